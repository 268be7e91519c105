"""Pacing: when a poll that finds nothing lets others run."""

from __future__ import annotations

import time
from collections.abc import Callable

YIELD_S = 0.001
"""An idle poll lets the caller's loop run at most once in this time."""
PAUSE_S = 0.0001
"""How long a caller that polls more often than that rests then."""


class Pacing:
    """What one worker's idle polls look at besides their flag: the time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._polled_s = self._yielded_s = 0.0

    def is_due_for_yield(self) -> bool:
        """Whether the caller's loop is to run. Rests first where polls follow each other at once: a loop that
        looks for events without waiting gives the GIL up for an instant only, and no thread wakes so fast,
        so that what it polls for would take seconds."""
        now_s, polled_s = self._clock(), self._polled_s
        self._polled_s = now_s
        if now_s - self._yielded_s < YIELD_S:
            return False
        self._yielded_s = now_s
        if now_s - polled_s < YIELD_S:
            time.sleep(PAUSE_S)  # for the threads that it polls for
        return True
