"""Each of the public failures that the project answers for has a test that carries its number."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
ANSWERED = range(1, 73)


def test_every_answered_case_has_a_test() -> None:
    numbers = {
        int(number)
        for path in TESTS.rglob("test_*.py")
        for name in re.findall(r"^(?:async )?def test_((?:c\d\d_)+)", path.read_text(), re.MULTILINE)
        for number in re.findall(r"c(\d\d)_", name)
    }
    assert [f"C{number:02}" for number in ANSWERED if number not in numbers] == []
