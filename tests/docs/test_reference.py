"""The generated reference pages are those that the code gives now; examples keep to their size."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_reference_pages_are_current() -> None:
    command = [sys.executable, str(DOCS / "reference" / "generate.py"), "--check"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_an_adapter_takes_less_than_60_lines_per_side() -> None:
    text = (DOCS / "how-to" / "integrate.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 4
    assert all(block.count("\n") < 60 for block in blocks)
