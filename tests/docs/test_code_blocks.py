"""Every Python block of the README and the documents runs, in order, as one program per document."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.process.scripts import run

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
STRICT = """
import warnings
warnings.filterwarnings("error", category=UserWarning, module="wbridge$")
"""
DOCUMENTS = [
    path
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
    if BLOCK.search(path.read_text())
]


def program(document: Path) -> str:
    """Return the blocks of `document`, each on its own lines there, so that tracebacks point at it."""
    text = document.read_text()
    source = ""
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start(1))
        source += "\n" * (line - source.count("\n")) + block.group(1)
    return source


@pytest.mark.process
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_blocks_run(document: Path, tmp_path: Path) -> None:
    script = tmp_path / document.with_suffix(".py").name
    script.write_text(program(document))
    code, printed = run(script, first=STRICT, timeout_s=55)
    assert code == 0, printed
