"""Virtual environments of the measured systems, one each, made when first asked for."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / ".nox" / "peers"
REQUIREMENTS = Path(__file__).parent / "requirements"
CONSTRAINTS = ROOT / "constraints.txt"
PATIENCE_S = 900


class Unavailable(Exception):
    """A system cannot be measured on this machine; the message says why."""


def python_of(environment: str) -> Path:
    """Return the interpreter of an environment, which is built unless it was built from the same files.

    The empty name is the environment of the caller.

    Raises:
        Unavailable: what it needs cannot be installed.
    """
    if not environment:
        return Path(sys.executable)
    directory = PLACE / environment
    python, stamp = directory / "bin" / "python", directory / "built-from"
    digest = _digest(environment)
    if stamp.exists() and stamp.read_text() == digest:
        return python
    print(f"building {directory.relative_to(ROOT)}", flush=True)
    _run([sys.executable, "-m", "venv", "--clear", str(directory)])
    # One torch for all: no package may bring another one.
    install = [str(python), "-m", "pip", "install", "--quiet", "-c", str(CONSTRAINTS)]
    _run([*install, "-r", str(REQUIREMENTS / f"{environment}.txt")])
    without = REQUIREMENTS / f"{environment}.no-deps.txt"
    if without.exists():
        _run([*install, "--no-deps", "-r", str(without)])
    stamp.write_text(digest)
    return python


def versions_in(environment: str) -> dict[str, str]:
    """The versions of what the environment's files name."""
    named = (REQUIREMENTS / f"{environment}.txt", REQUIREMENTS / f"{environment}.no-deps.txt")
    lines = [line for path in named if path.exists() for line in path.read_text().split()]
    return dict(line.split("==") for line in lines if "==" in line)


def _digest(environment: str) -> str:
    files = [CONSTRAINTS, *sorted(REQUIREMENTS.glob(f"{environment}.*"))]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()


def _run(command: list[str]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE_S)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise Unavailable((errors or done.stderr.splitlines() or ["no message"])[-1].strip()[:300])
