"""Scatters: the copies of one version into the parameters, many in flight at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable

from wbridge.device.base import Event
from wbridge.device.cpu import DoneEvent
from wbridge.device.wakeup import Latch
from wbridge.plan.types import Group
from wbridge.staging.base import ReceiverStaging

Then = Callable[[], Awaitable[None]]


class Scatters:
    """Starts copies in order and waits for them in order, with as few wake-ups as the slots allow.

    `stopped` is called with each slot whose copy is over, well or not, with the last ones in `release`;
    `failed` with the first error, at once. While `wants_slots` returns True each copy is waited for,
    otherwise the newest of those started.
    """

    def __init__(
        self,
        staging: ReceiverStaging,
        *,
        stopped: Callable[[int], None],
        failed: Callable[[Exception], None],
        wants_slots: Callable[[], bool],
    ) -> None:
        self._staging = staging
        self._stopped = stopped
        self._failed = failed
        self._wants_slots = wants_slots
        self._flying: deque[tuple[int, Event, Then | None]] = deque()  # the older, the earlier it ends
        self._last: list[int] = []
        self._is_closed = False
        self._changed = Latch()
        self.error: Exception | None = None

    @property
    def is_over(self) -> bool:
        """Nothing is in flight, and nothing will be."""
        return self._is_closed and not self._flying

    def start(self, group: Group, slot: int, *, after: Event | None, then: Then | None = None) -> None:
        """Copy `group` out of `slot`, behind all copies before it and not before `after` is done; `then` is
        awaited before the slot is given back, and may raise."""
        try:
            event = self._staging.scatter(group, slot, after=after)
        except Exception as exc:  # kept in `error`, which whoever runs this raises
            self._fail(exc)
            self._stopped(slot)
        else:
            self._flying.append((slot, event, then))
            self._changed.set()

    def close_if_over(self) -> bool:
        """Close, if every copy so far ended well in `start`, so that nothing is to be waited for.

        Of any other event only a wait says whether its work has failed.
        """
        is_well = self.error is None and all(
            isinstance(event, DoneEvent) and then is None for _, event, then in self._flying
        )
        if is_well:
            self._last += [slot for slot, _, _ in self._flying]
            self._flying.clear()
            self.close()
        return is_well

    def close(self) -> None:
        """No more will be started: `run` returns when those in flight have stopped, `release` is due then."""
        self._is_closed = True
        self._changed.set()

    async def run(self) -> None:
        """Give slots back until closed. Cancelled: the copies go on, and their slots stay taken."""
        while self._flying or not self._is_closed:
            if not self._flying:
                self._changed = Latch()
                await self._changed.wait()
                continue
            count = 1 if self._wants_slots() else len(self._flying)
            await self._settle(self._flying[count - 1][1].wait)
            for _ in range(count):
                slot, event, then = self._flying[0]
                await self._settle(event.wait)  # over by now; it may have failed all the same
                if then is not None:
                    await self._settle(then)
                self._flying.popleft()
                self._last.append(slot)
            if not self.is_over:
                self.release()

    def release(self) -> None:
        """Give the slots of the last copies back. Not part of `run`, whose end somebody waits for."""
        slots, self._last = self._last, []
        for slot in slots:
            self._stopped(slot)

    async def _settle(self, wait: Then) -> None:
        try:
            await wait()
        except Exception as exc:  # kept in `error`, which whoever runs this raises
            self._fail(exc)

    def _fail(self, error: Exception) -> None:
        if self.error is None:
            self.error = error
            self._failed(error)
