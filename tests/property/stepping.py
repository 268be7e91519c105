"""The workers of an engine as the explorer sees them, and how their steps depend on each other."""

from __future__ import annotations

from wbridge.flow.actions import Apply
from wbridge.flow.follower import Follower


class Worker:
    def __init__(self, follower: type[Follower]) -> None:
        self.follower = follower()
        self.phase = "between"  # between, stepping, polled (counted), handed (to the loop), waiting, gone
        self.version = 0
        self.outcome = ""  # of a poll that failed: clean, tainted; or dead
        self.timer = 0
        self.hook = 0
        self.apply: Apply | None = None
        self.cancelled = False
        self.filling = 0  # small ring: the ticket of which as much as fits is on its way
        self.bytes = False  # the granted bytes are here
        self.void = False  # the grant is void


def can_finish(workers: list[Worker], depends: str, i: int) -> bool:
    """Whether what worker `i`'s step depends on has come about."""
    step = workers[i].follower.counter + 1
    if any(worker.outcome for worker in workers):
        return True  # a step whose peer is gone fails, and ends
    counters = [worker.follower.counter for worker in workers]
    if depends == "tp":
        begun = [w.follower.counter + (w.phase == "stepping") for w in workers]
        return min(begun) >= step
    if depends == "pp":
        return counters[i - 1] >= step if i else counters[-1] >= step - 2
    return step - min(counters) <= 2
