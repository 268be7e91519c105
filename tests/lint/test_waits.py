"""Tests that wait for other threads let them run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
OF_JOBS = ("faults", "process", "unit/engine", "unit/session")
"""Whose adapters have threads of their own; elsewhere all happens in the loop that waits."""


def test_no_loop_waits_without_pausing() -> None:
    """A loop in which every turn is ready gives the GIL up for an instant only, and no thread wakes so fast:
    what the loop waits for may take seconds. `anyio.sleep(0.001)` lets it happen."""
    paths = [path for folder in OF_JOBS for path in sorted((TESTS / folder).rglob("*.py"))]
    assert [found for path in paths for found in spinning(path)] == []


def spinning(path: Path) -> Iterator[str]:
    """Loops that do nothing between two looks but `await checkpoint()`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.While) and any(is_checkpoint(line) for line in node.body):
            yield f"{path.relative_to(TESTS)}:{node.lineno}"


def is_checkpoint(line: ast.stmt) -> bool:
    return isinstance(line, ast.Expr) and ast.unparse(line) == "await anyio.lowlevel.checkpoint()"
