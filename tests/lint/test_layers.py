"""The order of the layers and the purity of the core, as import-linter sees them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_contracts_hold() -> None:
    command = [
        sys.executable,
        "-c",
        "from importlinter.cli import lint_imports_command as run; run()",
        "--no-cache",
    ]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_package_has_a_layer() -> None:
    config = (ROOT / "pyproject.toml").read_text()
    packages = {
        path.stem for path in (ROOT / "src" / "wbridge").iterdir() if path.suffix == ".py" or path.is_dir()
    }
    listed = {package for package in packages if f"wbridge.{package}" in config}
    assert packages - listed - {"__init__", "__pycache__"} == set()
