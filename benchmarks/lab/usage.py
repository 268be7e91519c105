"""How busy the cores are: the lab's own processes, and the whole machine."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
SOFT_INTERRUPTS = 6
IDLE, WAITING = 3, 4
"""Columns of /proc/stat."""


@dataclass(frozen=True)
class Usage:
    """Parts of all cores, from 0 to 1."""

    lab: float
    """The lab's processes, and all soft interrupts of the machine: packets are passed on in those."""
    machine: float


class Meter:
    """Measures from where it is made until `read`."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._begin = self._look()

    def read(self) -> Usage:
        wall_s, lab_s, busy_s = (now - then for now, then in zip(self._look(), self._begin, strict=True))
        available_s = wall_s * (os.cpu_count() or 1)
        return Usage(lab_s / available_s, busy_s / available_s)

    def _look(self) -> tuple[float, float, float]:
        """The clock, and CPU seconds so far of the lab and of the machine."""
        columns = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        busy = sum(columns) - columns[IDLE] - columns[WAITING]
        own = sum(map(_process_ticks, self._pids)) + columns[SOFT_INTERRUPTS]
        return time.monotonic(), own / TICKS_PER_S, busy / TICKS_PER_S


def _process_ticks(pid: int) -> int:
    # The name in parentheses may contain anything; user and system time are the 12th and 13th after it.
    status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(status[11]) + int(status[12])
