"""A one-shot event that any thread may set and one event loop awaits."""

from __future__ import annotations

import asyncio

import anyio


class Wakeup:
    """Created on the loop that will wait; `set` may come from any thread, also after that loop has ended."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = anyio.Event()

    def set(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._event.set)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return

    async def wait(self) -> None:
        """Return once set. Cancelled: leaves nothing behind."""
        await self._event.wait()
