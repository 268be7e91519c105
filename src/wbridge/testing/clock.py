"""Virtual time: a whole job in one thread and one event loop whose clock jumps when nothing is ready."""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from typing import Any, Final, TypeVar, TypeVarTuple

import anyio
import anyio.abc
import anyio.lowlevel
import anyio.to_thread

from wbridge.errors import EndpointClosed, InternalError
from wbridge.session.portal import Call, loops_from

T = TypeVar("T")
Args = TypeVarTuple("Args")

SETTLE_S: Final = 0.001
"""What the kernel may take to carry bytes from one loopback socket to another, in real time."""
MOMENT_S: Final = 0.01
"""A jump this short is no deadline: should bytes still be on their way, they are as good afterwards."""

owner: Final[ContextVar[str]] = ContextVar("owner", default="")
"""The name of the adapter that the running task belongs to; empty in the caller's own tasks."""


def run_virtual(
    main: Callable[[], Awaitable[T]],
    *,
    seed: int = 0,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> T:
    """Run `main()` under virtual time: adapters made in it have no threads, and waiting costs nothing.

    Sockets are real. Work for threads runs in the loop, at its next pass; randomised pauses depend on
    `seed`. `anyio.current_time()` begins at 0. `loop_factory` makes another kind of `VirtualTimeLoop`.

    Raises:
        InternalError: everybody waits, and nothing is there to wait for.
    """

    async def whole() -> T:
        async with anyio.create_task_group() as tasks:
            with loops_from(lambda name: SharedLoop(name, tasks)):
                return await main()
        raise AssertionError("a task group swallows only its own cancellation, and nobody cancels it")

    state = random.getstate()
    random.seed(seed)
    try:
        with _threads_inline():
            options = {"loop_factory": loop_factory or VirtualTimeLoop}
            return anyio.run(whole, backend="asyncio", backend_options=options)
    finally:
        random.setstate(state)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Its time stands still while anything can run, and then jumps to the next timer."""

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(_Jumps(self))

    def time(self) -> float:
        return self.now_s

    def run_in_executor(
        self, executor: object, func: Callable[[*Args], T], *args: *Args
    ) -> asyncio.Future[T]:
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as exc:  # reported through the future, as an executor does
            future.set_exception(exc)
        return future


class _Jumps(selectors.DefaultSelector):
    """Looks at the sockets, and instead of waiting moves the clock."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return super().select(0)
        is_short = timeout is not None and timeout < MOMENT_S
        if ready := super().select(0 if is_short else SETTLE_S):
            return ready
        if timeout is None:
            raise InternalError("everybody waits for an event, and no timer runs that would end it")
        self._loop.now_s += timeout
        return []


@contextmanager
def _threads_inline() -> Iterator[None]:
    """What is handed to a thread runs in the loop, one pass later, and cannot be cancelled there."""

    async def run_sync(
        func: Callable[[*Args], T],
        *args: *Args,
        abandon_on_cancel: bool = False,
        limiter: anyio.CapacityLimiter | None = None,
    ) -> T:
        await anyio.lowlevel.checkpoint()
        return func(*args)

    original = anyio.to_thread.run_sync
    anyio.to_thread.run_sync = run_sync  # type: ignore[assignment]  # has no `cancellable`, long deprecated
    try:
        yield
    finally:
        anyio.to_thread.run_sync = original


class SharedLoop:
    """An adapter's `Loop` inside the running event loop. What has not ended yet at `stop` ends soon after.

    Not for blocking adapters: those would wait for the very loop they block.
    """

    def __init__(self, name: str, tasks: anyio.abc.TaskGroup) -> None:
        self.name = name
        self.is_forked = False
        self._tasks = tasks
        self._clock = asyncio.get_running_loop().time
        self._calls: set[Call[Any]] = set()  # Any: each call has its own result type
        self._is_started = self._is_stopped = False

    def clock(self) -> float:
        return self._clock()

    def start(self) -> None:
        self._is_started = True

    def submit(self, work: Callable[[], Awaitable[T]]) -> Call[T]:
        call: Call[T] = Call()
        self._context().run(self.begin, call, work)
        return call

    def begin(self, call: Call[T], work: Callable[[], Awaitable[T]]) -> None:
        self._calls.add(call)
        self._tasks.start_soon(self._run, call, work)

    def call(self, function: Callable[[], object]) -> None:
        asyncio.get_running_loop().call_soon(function, context=self._context())

    def _context(self) -> Context:
        if not self._is_started:
            raise EndpointClosed(f"{self.name} is not connected; call connect() first")
        if self._is_stopped:
            raise EndpointClosed(f"{self.name} is closed")
        context = copy_context()
        context.run(owner.set, self.name)
        return context

    async def _run(self, call: Call[T], work: Callable[[], Awaitable[T]]) -> None:
        try:
            await call.run(work)
        except anyio.get_cancelled_exc_class():
            if self._tasks.cancel_scope.cancel_called:
                raise
            return  # cut by a test: this call alone has ended
        finally:
            self._calls.discard(call)

    def cancel(self, call: Call[T]) -> None:
        call.request_cancel()

    def stop(self, *, wait: bool) -> None:
        self._is_stopped = True
        for call in list(self._calls):
            call.request_cancel()
