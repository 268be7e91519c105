"""Each public failure that this version answers for has a test that carries its number."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
ANSWERED = (
    *range(1, 18),
    *range(19, 30),
    *range(30, 36),
    *(37, 38, 39),
    *range(41, 59),
    *(60, 61, 62, 63, 64, 65, 66, 67, 69, 70, 71),
)


def test_every_answered_case_has_a_test() -> None:
    numbers = {
        int(number)
        for path in TESTS.rglob("test_*.py")
        for name in re.findall(r"^(?:async )?def test_((?:c\d\d_)+)", path.read_text(), re.MULTILINE)
        for number in re.findall(r"c(\d\d)_", name)
    }
    assert [f"C{number:02}" for number in ANSWERED if number not in numbers] == []
