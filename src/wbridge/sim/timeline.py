"""Timeline: virtual time, in which events happen in order and waiting costs nothing."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Timeline:
    """Calls what is due, earliest first; what is due at one time, in the order in which it was planned."""

    def __init__(self) -> None:
        self.now: float = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def at(self, time_s: float, call: Callable[[], None]) -> None:
        assert time_s >= self.now, f"{time_s} is over at {self.now}"
        heapq.heappush(self._due, (time_s, self._number, call))
        self._number += 1

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        self.at(self.now + delay_s, call)

    def run(self, until: Callable[[], bool]) -> bool:
        """Go on until `until()`; return False if nothing is due before."""
        while not until():
            if not self._due:
                return False
            self.now, _, call = heapq.heappop(self._due)
            call()
        return True


class Server:
    """Does one thing after the other, such as a copy engine or a worker's event loop."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._free_s = 0.0

    def do(self, duration_s: float, then: Callable[[], None]) -> None:
        """Call `then` when this is done, after all that was asked for before."""
        self._free_s = max(self._free_s, self._timeline.now) + duration_s
        self._timeline.at(self._free_s, then)
