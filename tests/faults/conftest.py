"""A table of the killed and stopped processes, after a run of more than a sample."""

from __future__ import annotations

from collections import Counter

import pytest

ENOUGH_FOR_A_TABLE = 50


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print, for each kind of fault, mode and role, how many transitions passed and failed."""
    counts: dict[tuple[str, str, str], Counter[str]] = {}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, ()):
            path, _, name = report.nodeid.partition("::")
            if not path.endswith(("test_kills.py", "test_relay_kills.py")) or report.when != "call":
                continue
            fault, _, case = name.rstrip("]").partition("[")
            mode, _, rest = case.partition("-")
            role = rest.rpartition("-")[0]
            if mode not in ("sync", "async") or not role:
                continue
            counts.setdefault((fault, mode, role), Counter())[outcome] += 1
    if sum(count.total() for count in counts.values()) < ENOUGH_FOR_A_TABLE:
        return
    terminalreporter.section("transitions")
    for (fault, mode, role), count in sorted(counts.items()):
        terminalreporter.line(
            f"{mode:6}{role:12}{count['passed']:4} passed{count['failed']:4} failed  {fault}"
        )
