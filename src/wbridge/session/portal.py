"""The adapter's own event-loop thread, and how a caller's thread or coroutine waits for work in it."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, Generic, Protocol, TypeVar

import anyio
from anyio.from_thread import BlockingPortal

from wbridge.errors import EndpointClosed

T = TypeVar("T")


class Call(Generic[T]):
    """A coroutine running in the loop thread. Its result is waited for from anywhere.

    `cancel` asks it to stop; it is finished only when its own cleanup is, and that is what the
    waiting functions wait for.
    """

    def __init__(self) -> None:
        self.finished: Future[T] = Future()
        self.ended: anyio.Event = anyio.Event()
        """The same for the loop thread itself."""
        self._scope: anyio.CancelScope | None = None
        self._cancel_requested = False

    async def run(self, work: Callable[[], Awaitable[T]]) -> None:
        """Run `work` in the loop thread and keep its outcome, cancellation by `cancel` included."""
        try:
            with anyio.CancelScope() as self._scope:
                if self._cancel_requested:
                    self._scope.cancel()
                try:
                    result = await work()
                except Exception as exc:  # reported to the caller's thread, which raises it
                    self.finished.set_exception(exc)
                else:
                    self.finished.set_result(result)
        finally:
            self.ended.set()
            if not self.finished.done():
                self.finished.set_exception(EndpointClosed("the call was cancelled, or the adapter closed"))

    def request_cancel(self) -> None:
        """Runs in the loop thread."""
        self._cancel_requested = True
        if self._scope is not None:
            self._scope.cancel()


class Loop(Protocol):
    """Where an adapter's coroutines run, as its caller sees it."""

    name: str
    is_forked: bool
    """This process is a fork of the one that made this object; kept so that asking costs nothing."""

    def clock(self) -> float:
        """The loop's time in seconds, for any thread: deadlines and pauses are measured by it."""
        ...

    def start(self) -> None: ...

    def submit(self, work: Callable[[], Awaitable[T]]) -> Call[T]:
        """Start `work()` there; calls start in the order of submission.

        Raises:
            EndpointClosed: the loop has not started or has ended, or this process is a fork of the one
                that started it.
        """
        ...

    def cancel(self, call: Call[T]) -> None:
        """Ask a call to stop. It is over when `call.finished` is."""
        ...

    def stop(self, *, wait: bool) -> None:
        """Cancel what still runs and end. Blocks until it has ended if `wait`. Idempotent."""
        ...


class LoopThread:
    """One event loop in one thread of its own; progress never needs the caller's loop.

    Not usable in a forked child: every call there raises.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._portal: Future[BlockingPortal] = Future()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._stop: anyio.Event | None = None
        self.is_forked = False
        _threads.add(self)

    def clock(self) -> float:
        return time.monotonic()

    def start(self) -> None:
        self._thread.start()
        self._portal.result()

    def _main(self) -> None:
        anyio.run(self._serve, backend="asyncio")

    async def _serve(self) -> None:
        async with BlockingPortal() as portal:
            self._stop = anyio.Event()
            self._portal.set_result(portal)
            await self._stop.wait()
            await portal.stop(cancel_remaining=True)

    def submit(self, work: Callable[[], Awaitable[T]]) -> Call[T]:
        if self.is_forked:
            raise EndpointClosed(
                f"{self.name} was opened by the parent of this process and does not survive fork();"
                " open another one here"
            )
        if self._thread.ident is None:
            raise EndpointClosed(f"{self.name} is not connected; call connect() first")
        call: Call[T] = Call()
        try:
            self._portal.result().start_task_soon(call.run, work)
        except RuntimeError as exc:
            raise EndpointClosed(f"{self.name} is closed") from exc
        return call

    def cancel(self, call: Call[T]) -> None:
        try:
            self._portal.result().start_task_soon(self._cancel, call)
        except RuntimeError:
            return  # the thread has ended, and every call with it

    @staticmethod
    async def _cancel(call: Call[T]) -> None:
        call.request_cancel()

    def stop(self, *, wait: bool) -> None:
        if self.is_forked or not self._thread.is_alive():
            return
        self._portal.result().start_task_soon(self._set_stop)
        if wait:
            self._thread.join()

    async def _set_stop(self) -> None:
        assert self._stop is not None
        self._stop.set()


_opener: Final[ContextVar[Callable[[str], Loop]]] = ContextVar("opener", default=LoopThread)


def open_loop(name: str) -> Loop:
    """Return a new adapter's loop: a thread of its own, unless made inside `loops_from`."""
    return _opener.get()(name)


@contextmanager
def loops_from(opener: Callable[[str], Loop]) -> Iterator[None]:
    """Give adapters that are made inside this context their loop by `opener(name)`.

    The one way to run adapters without threads: `wbridge.testing.clock` puts whole jobs into one loop.
    """
    token = _opener.set(opener)
    try:
        yield
    finally:
        _opener.reset(token)


_threads: weakref.WeakSet[LoopThread] = weakref.WeakSet()


def _note_fork() -> None:
    for thread in _threads:
        thread.is_forked = True


os.register_at_fork(after_in_child=_note_fork)
