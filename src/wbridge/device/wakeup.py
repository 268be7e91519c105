"""How threads and devices wake those who wait on an event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final

import anyio

_PATIENCE_S: Final = 0.25


class Latch:
    """Like `anyio.Event`, and costs nothing unless somebody waits. For one event loop."""

    def __init__(self) -> None:
        self._is_set = False
        self._event: anyio.Event | None = None

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        if self._event is not None:
            self._event.set()

    async def wait(self) -> None:
        """Return once set. Cancelled: leaves nothing behind."""
        if not self._is_set:
            self._event = self._event or anyio.Event()
            await self._event.wait()


class Wakeup:
    """A one-shot event, created on the loop that will wait. `set` may come from any thread, also after that
    loop has ended."""

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


class Bell:
    """An eventfd that code without the GIL writes, and one event loop reads: those who wait look then.

    Created on the loop that will wait.
    """

    def __init__(self) -> None:
        self.descriptor: int = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[anyio.Event, Callable[[], bool]] = {}
        self._is_closed = False

    async def wait(self, is_over: Callable[[], bool], ask: Callable[[], None]) -> None:
        """Return when `is_over()`, which is looked at whenever the bell rings, or when the bell is closed.

        `ask` makes it ring then. It is called once: what asks a device takes room in its queue, and the
        thread that finds it full stands still. Looks now and then without having heard it: a device that
        fails does not ring. Cancelled: leaves nothing behind but a ring that nobody needs.
        """
        if self._is_vain(is_over):
            return
        news = anyio.Event()
        self._add(news, is_over)
        try:
            ask()
            while not self._is_vain(is_over):
                with anyio.move_on_after(_PATIENCE_S):
                    await news.wait()
        finally:
            self._remove(news)

    def _is_vain(self, is_over: Callable[[], bool]) -> bool:
        return self._is_closed or is_over()

    def close(self) -> None:
        """Nothing may ring it any more. From any thread; idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._loop.call_soon_threadsafe(self._close)
        except RuntimeError:  # the loop is closed
            os.close(self.descriptor)

    def _close(self) -> None:
        self._loop.remove_reader(self.descriptor)
        self._tell(list(self._waiting))
        os.close(self.descriptor)

    def _add(self, news: anyio.Event, is_over: Callable[[], bool]) -> None:
        if not self._waiting:  # only while somebody waits, so that a loop may end before the bell
            self._loop.add_reader(self.descriptor, self._heard)
        self._waiting[news] = is_over

    def _remove(self, news: anyio.Event) -> None:
        self._waiting.pop(news, None)
        if not self._waiting and not self._is_closed:
            self._loop.remove_reader(self.descriptor)

    def _heard(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)
        self._tell([news for news, is_over in self._waiting.items() if _is_news(is_over)])

    @staticmethod
    def _tell(those: Iterable[anyio.Event]) -> None:
        for news in those:
            news.set()


def _is_news(is_over: Callable[[], bool]) -> bool:
    try:
        return is_over()
    except RuntimeError:  # the device has failed: whoever waits asks again, and gets the error
        return True
