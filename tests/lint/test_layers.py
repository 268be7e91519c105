"""The order of the layers and the purity of the core, as import-linter sees them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUN_LINTER = "from importlinter.cli import lint_imports_command as run; run()"


def test_contracts_hold() -> None:
    command = [sys.executable, "-c", RUN_LINTER, "--no-cache", "--no-logo"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_package_has_a_layer() -> None:
    config = (ROOT / "pyproject.toml").read_text()
    entries = (ROOT / "src" / "wbridge").iterdir()
    packages = {path.stem for path in entries if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert {package for package in packages if f"wbridge.{package}" not in config} == {"__init__"}
