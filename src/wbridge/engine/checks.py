"""Checks: whether the bytes in a slot are those that were sent."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import anyio
import anyio.to_thread
import msgspec

from wbridge.errors import InternalError
from wbridge.flow.messages import Arrived
from wbridge.staging.checksum import checksum

CHECKS_AT_ONCE: Final = 4
"""Threads that compute checksums of what has arrived; few, since each keeps a core busy."""


class Check(msgspec.Struct, frozen=True):
    """A piece that counts as arrived when its bytes have been found right."""

    writer: str
    arrived: Arrived
    slot: int
    view: memoryview


class Checks:
    """Compares pieces with their checksums, beside the loop. `found` hears of each whether it is right."""

    def __init__(self, found: Callable[[Check, bool], None]) -> None:
        self._found = found
        self._ticket = 0
        self._right: dict[int, list[Check]] = {}  # by group, of this ticket
        # Unbounded, bounded by what may be in it: one check for each piece.
        self._queue, self._inbox = anyio.create_memory_object_stream[Check](math.inf)

    def begin(self, ticket: int) -> None:
        """From now on remember what is found right of this ticket, and of no other."""
        self._ticket = ticket
        self._right.clear()

    def add(self, check: Check) -> None:
        self._queue.send_nowait(check)

    async def run(self) -> None:
        """Check until cancelled."""
        with self._queue, self._inbox:
            async with anyio.create_task_group() as tasks:
                for _ in range(CHECKS_AT_ONCE):
                    tasks.start_soon(self._work)
        raise InternalError("nobody checks what arrives any more; please report it")

    async def _work(self) -> None:
        async for check in self._inbox:
            is_right = await _is_right(check)
            if is_right and check.arrived.ticket == self._ticket:
                self._right.setdefault(check.arrived.group, []).append(check)
            self._found(check, is_right)

    async def again(self, group: int) -> bool:
        """Whether all that was found right of `group` still is, in the memory where it was."""
        for check in self._right.get(group, ()):
            if not await _is_right(check):
                return False
        return True


async def _is_right(check: Check) -> bool:
    return await anyio.to_thread.run_sync(checksum, check.view) == check.arrived.checksum
