"""The adapter's own event-loop thread, and how a caller's thread or coroutine waits for work in it."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import Context, ContextVar, copy_context
from typing import Final, Generic, Protocol, TypeVar

import anyio
import anyio.abc

from wbridge.errors import EndpointClosed

T = TypeVar("T")


class Call(Generic[T]):
    """A coroutine running in the loop thread. Its result is waited for from anywhere.

    `cancel` asks it to stop; it is finished only when its own cleanup is, and that is what the
    waiting functions wait for.
    """

    def __init__(self) -> None:
        self.finished: Future[T] = Future()
        self.on_cancel: Callable[[], None] | None = None
        """What a cancellation does while no coroutine runs; in the loop thread."""
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
            if not self.finished.done():
                self.finished.set_exception(EndpointClosed("the call was cancelled, or the adapter closed"))

    def request_cancel(self) -> None:
        """Runs in the loop thread."""
        self._cancel_requested = True
        if self._scope is not None:
            self._scope.cancel()
        elif self.on_cancel is not None and not self.finished.done():
            self.on_cancel()


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

    def begin(self, call: Call[T], work: Callable[[], Awaitable[T]]) -> None:
        """Like `submit`, for a call that is there already, and from the loop itself."""
        ...

    def call(self, function: Callable[[], object]) -> None:
        """Call `function` there, in the order of submission, and wait for nothing. Raises as `submit`."""
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
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._loop: asyncio.AbstractEventLoop
        self._tasks: anyio.abc.TaskGroup
        self._stop: anyio.Event
        self._context: Context  # which says that this is a loop, as that of a caller's thread does not
        self._lock = threading.Lock()
        self._is_over = False
        self.is_forked = False
        _threads.add(self)

    def clock(self) -> float:
        return time.monotonic()

    def start(self) -> None:
        self._thread.start()
        self._started.result()

    def _main(self) -> None:
        anyio.run(self._serve, backend="asyncio")

    async def _serve(self) -> None:
        self._loop, self._stop, self._context = asyncio.get_running_loop(), anyio.Event(), copy_context()
        async with anyio.create_task_group() as self._tasks:
            self._started.set_result(None)
            await self._stop.wait()
            with self._lock:  # what was submitted before this is run by the loop as it ends
                self._is_over = True
            self._tasks.cancel_scope.cancel()

    def submit(self, work: Callable[[], Awaitable[T]]) -> Call[T]:
        call: Call[T] = Call()
        self.call(functools.partial(self.begin, call, work))
        return call

    def begin(self, call: Call[T], work: Callable[[], Awaitable[T]]) -> None:
        if self._is_over:
            call.finished.set_exception(EndpointClosed(f"{self.name} is closed"))
        else:
            self._tasks.start_soon(call.run, work)

    def call(self, function: Callable[[], object]) -> None:
        if self.is_forked:
            raise EndpointClosed(
                f"{self.name} was opened by the parent of this process and does not survive fork();"
                " open another one here"
            )
        if self._thread.ident is None:
            raise EndpointClosed(f"{self.name} is not connected; call connect() first")
        with self._lock:
            if self._is_over:
                raise EndpointClosed(f"{self.name} is closed")
            self._loop.call_soon_threadsafe(function, context=self._context)

    def cancel(self, call: Call[T]) -> None:
        with suppress(EndpointClosed):  # the thread has ended, and every call with it
            self.call(call.request_cancel)

    def stop(self, *, wait: bool) -> None:
        if self.is_forked or not self._thread.is_alive():
            return
        with suppress(EndpointClosed):
            self.call(self._stop.set)
        if wait:
            self._thread.join()


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
