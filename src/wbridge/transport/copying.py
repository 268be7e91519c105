"""Copies: memory moved in threads, and how to wait until none moves any more."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import anyio
import anyio.lowlevel
import anyio.to_thread

from wbridge.device.memory import move
from wbridge.device.wakeup import Latch

_INLINE_NBYTES: Final = 256 * 1024
"""Longer copies run in a thread, without the GIL, so that the loop goes on."""


class Copies:
    """The copies of one endpoint that are under way."""

    def __init__(self) -> None:
        self._running: set[Latch] = set()

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Surround a copy; it counts as running until the end of the block."""
        ended = Latch()
        self._running.add(ended)
        try:
            yield
        finally:
            self._running.discard(ended)
            ended.set()

    async def settle(self) -> None:
        """Return when all that run now have ended."""
        for ended in list(self._running):
            await ended.wait()


async def copy(target: memoryview, source: memoryview) -> None:
    """Copy all of `source`. Cancelled: returns, cancelled, when the copy has ended."""
    if source.nbytes <= _INLINE_NBYTES or source.readonly:
        target[:] = source.cast("B") if source.nbytes else b""
        return
    with anyio.CancelScope(shield=True):
        await anyio.to_thread.run_sync(move, target, source)
    await anyio.lowlevel.checkpoint_if_cancelled()
