"""StepGate: forward passes and applies exclude each other."""

from __future__ import annotations

import threading
from concurrent.futures import Future


class StepGate:
    """Counts open steps; an apply closes the gate when none is open, and steps wait until it opens again.

    Any thread may use it. `try_close` is called by the poll, `open` by the poll or the loop thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_open = 0
        self._closed = False
        self._drained: Future[None] | None = None
        self._opened: Future[None] = Future()

    def enter(self, *, wait_for_apply: bool) -> Future[None] | None:
        """Count one more open step, or return the future to wait for before trying again.

        With `wait_for_apply` a step also waits for an apply that itself still waits for open steps,
        which keeps a crowd of overlapping steps from starving it. A caller that would block its event
        loop must not: those open steps may need the loop to end.
        """
        with self._lock:
            if self._closed or (wait_for_apply and self._drained is not None):
                return self._opened
            self._num_open += 1
            return None

    def leave(self) -> None:
        with self._lock:
            self._num_open -= 1
            drained = self._drained if self._num_open == 0 else None
        if drained is not None and not drained.done():
            drained.set_result(None)

    def try_close(self) -> Future[None] | None:
        """Close the gate, or return the future to wait for before trying again: steps are still open."""
        with self._lock:
            if not self._num_open:
                self._closed = True
                return None
            if self._drained is None or self._drained.done():
                self._drained = Future()
            return self._drained

    def open(self) -> None:
        """Let steps begin again. Idempotent."""
        with self._lock:
            self._closed, self._drained = False, None
            opened, self._opened = self._opened, Future()
        opened.set_result(None)
