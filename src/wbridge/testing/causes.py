"""Causes: the events that a wait ended with, each with the event that made it happen, under virtual time."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import Context, copy_context
from typing import Any, Final, TypeVar, TypeVarTuple

from wbridge.testing.clock import VirtualTimeLoop, owner, run_virtual

T = TypeVar("T")
Args = TypeVarTuple("Args")
Link = tuple[Any, Any]  # Any: addresses of whatever family
"""The two ends of a connection, as the side sees them that sends."""


class Step:
    """One run of one callback of the loop."""

    def __init__(self, number: int, owner: str, cause: Step | None) -> None:
        self.number = number
        self.owner = owner
        """The adapter that it belongs to; empty in the caller's own tasks."""
        self.cause = cause
        """The step that scheduled it, or sent what it reads."""

    def since(self, start: Step) -> Iterator[Step]:
        """This step and what led to it one after another, back to those before `start` began to wait."""
        step: Step | None = self
        while step is not None and step.number > start.number:
            yield step
            step = step.cause


class CausalLoop(VirtualTimeLoop):
    """Knows for each callback which one scheduled it. A callback that reads a socket was caused by the last
    one that wrote to its other end."""

    def __init__(self) -> None:
        self.current = Step(0, "", None)
        self._num_steps = 0
        self._sent: dict[Link, Step] = {}
        super().__init__()

    def call_soon(
        self, callback: Callable[[*Args], object], *args: *Args, context: Context | None = None
    ) -> asyncio.Handle:
        return super().call_soon(self._caused(callback, context), *args, context=context)

    def call_soon_threadsafe(
        self, callback: Callable[[*Args], object], *args: *Args, context: Context | None = None
    ) -> asyncio.Handle:
        return super().call_soon_threadsafe(self._caused(callback, context), *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Args], object], *args: *Args, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return super().call_at(when, self._caused(callback, context), *args, context=context)

    # Any: a socket or its number, and what asyncio's transports register for it
    def _add_reader(self, fd: Any, callback: Any, *args: Any) -> Any:
        link, context = _link_to(fd), copy_context()

        def read(*arguments: Any) -> None:
            self._run(callback, arguments, context, self._sent.get(link) if link else None)

        return super()._add_reader(fd, read, *args)  # type: ignore[misc]  # what asyncio's transports use

    def _caused(
        self, callback: Callable[[*Args], object], context: Context | None
    ) -> Callable[[*Args], object]:
        cause, chosen = self.current, context or copy_context()

        def caused(*args: *Args) -> None:
            self._run(callback, args, chosen, cause)

        return caused

    def _run(
        self, callback: Callable[[*Args], object], args: tuple[*Args], context: Context, cause: Step | None
    ) -> None:
        self._num_steps += 1
        before, self.current = self.current, Step(self._num_steps, context.get(owner, ""), cause)
        try:
            callback(*args)
        finally:
            self.current = before

    def note_sent(self, sender: socket.socket) -> None:
        self._sent[sender.getsockname(), sender.getpeername()] = self.current


def run_causal(main: Callable[[], Awaitable[T]]) -> T:
    """`run_virtual`, in a loop for which `waited` works."""
    send: Final = socket.socket.send

    def noted(self: socket.socket, data: Any, flags: int = 0) -> int:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, CausalLoop)
        loop.note_sent(self)
        return send(self, data, flags)

    with _replaced(noted):
        return run_virtual(main, loop_factory=CausalLoop)


async def waited(call: Callable[[], Awaitable[T]]) -> tuple[T, list[str]]:
    """Return what `call()` returns, and the owners of all steps that its end followed from, newest first."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, CausalLoop)
    start = loop.current
    result = await call()
    return result, [step.owner for step in loop.current.since(start)]


@contextmanager
def _replaced(send: Any) -> Iterator[None]:  # Any: a method of a socket
    socket.socket.send = send  # type: ignore[method-assign]  # asyncio sends by it, and so do we
    try:
        yield
    finally:
        del socket.socket.send  # the one of its base class again


def _link_to(fd: Any) -> Link | None:  # Any: a socket, or its number
    """The link by which bytes come to `fd`; None if it is no connection."""
    number = fd if isinstance(fd, int) else fd.fileno()
    with socket.socket(fileno=os.dup(number)) as twin:
        try:
            return twin.getpeername(), twin.getsockname()
        except OSError:
            return None
