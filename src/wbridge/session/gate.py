"""StepGate: forward passes and applies exclude each other."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from concurrent.futures import Future, InvalidStateError

from wbridge.errors import ProtocolError


class StepGate:
    """Counts open steps; an apply closes the gate when none is open, and steps wait until it opens again.

    Any thread may use it. `try_close` is called by the poll, `open` by the poll or the loop thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: Counter[int] = Counter()  # by the thread that entered
        self._closed = False
        self._poller = 0  # the thread of the poll that has closed the gate, or is about to
        self._drained: Future[None] | None = None
        self._waiting: dict[Future[int], int] = {}  # steps that `open` lets in, and their threads

    @property
    def is_closed(self) -> bool:
        return self._closed

    def enter(self, thread: int, *, blocking: bool, is_nested: bool = False) -> Future[int] | None:
        """Count one more open step, or return a future that is done when it has been counted.

        A step also waits for an apply that itself still waits for open steps, which keeps steps that
        follow or overlap each other from starving it. Not if it `is_nested` in an open one, which cannot
        end before it; nor if that would block a thread which has steps open itself, or the poll: they
        may need its event loop to end.

        Raises:
            ProtocolError: blocking would keep the very poll that applies from going on.
        """
        with self._lock:
            is_pollers = blocking and thread == self._poller
            if self._closed and is_pollers:
                raise ProtocolError(
                    "an update is being applied by a poll in this thread, which step() would block for ever;"
                    " use `async with receiver.step()` beside an event loop"
                )
            may_wait = not (is_nested or is_pollers or (blocking and self._open[thread]))
            if not self._closed and not (may_wait and self._drained is not None):
                self._open[thread] += 1
                return None
            entered: Future[int] = Future()
            self._waiting[entered] = thread
            return entered

    def give_up(self, entered: Future[int]) -> None:
        """The step that waits for `entered` does not begin."""
        with self._lock:
            thread = self._waiting.pop(entered, None)
        if thread is None:  # it was let in meanwhile
            self.leave(entered.result())

    def leave(self, thread: int) -> None:
        with self._lock:
            self._open[thread] -= 1
            self._open += Counter()  # forget threads without steps
            drained = None if self._open else self._drained
        if drained is not None:
            with contextlib.suppress(InvalidStateError):  # another thread's step ended at the same time
                drained.set_result(None)

    def try_close(self) -> Future[None] | None:
        """Close the gate, or return the future to wait for before trying again: steps are still open."""
        with self._lock:
            self._poller = threading.get_ident()
            if not self._open:
                self._closed = True
                return None
            if self._drained is None or self._drained.done():
                self._drained = Future()
            return self._drained

    def close_if_free(self, poller: int) -> bool:
        """Close the gate for the poll in thread `poller` if no step is open; otherwise change nothing."""
        with self._lock:
            if not self._open:
                self._poller, self._closed = poller, True
            return self._closed

    def open(self) -> None:
        """Let steps begin again. Idempotent.

        Those that wait are counted here: were they only woken, the next apply could shut them out for ever.
        """
        with self._lock:
            self._closed, self._poller, self._drained = False, 0, None
            entered, self._waiting = self._waiting, {}
            self._open.update(entered.values())
        for future, thread in entered.items():
            future.set_result(thread)
