"""Cost: what a call took, in wall time, CPU time and lost time slices."""

from __future__ import annotations

import contextlib
import resource
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Cost:
    """One call. Times in seconds; `begin_s` and `end_s` on the clock that all processes of a host share."""

    begin_s: float
    end_s: float
    thread_cpu_s: float
    process_cpu_s: float
    num_switches: int
    """How often the scheduler took the core away from a thread of this process that wanted to go on."""
    queued_s: float
    """How long threads of this process could have run and had no core, all together."""

    @property
    def wall_s(self) -> float:
        return self.end_s - self.begin_s


def measure(work: Callable[[], T]) -> tuple[T, Cost]:
    queued_s = _queued_s()
    process, thread = _usage()
    begin_s = time.perf_counter()
    result = work()
    end_s = time.perf_counter()
    process_after, thread_after = _usage()
    return result, Cost(
        begin_s,
        end_s,
        thread_cpu_s=_cpu_s(thread_after) - _cpu_s(thread),
        process_cpu_s=_cpu_s(process_after) - _cpu_s(process),
        num_switches=process_after.ru_nivcsw - process.ru_nivcsw,
        queued_s=_queued_s() - queued_s,
    )


def _usage() -> tuple[resource.struct_rusage, resource.struct_rusage]:
    return resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_THREAD)


def _queued_s() -> float:
    """What the scheduler knows of all threads; those that end during a measurement are few."""
    found = []
    for status in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found.append(int(status.read_text().split()[1]))
    return sum(found) / 1e9


def _cpu_s(usage: resource.struct_rusage) -> float:
    return usage.ru_utime + usage.ru_stime


def median_ms(seconds: Iterable[float]) -> float:
    """The median in milliseconds; 0 of nothing."""
    values = list(seconds)
    return 1e3 * statistics.median(values) if values else 0.0
