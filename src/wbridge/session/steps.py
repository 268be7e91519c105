"""Step: one forward pass between two applies, nested or not, in a thread or in a task."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from types import TracebackType

import anyio

from wbridge.errors import ProtocolError
from wbridge.ids import WorkerId
from wbridge.session.gate import StepGate
from wbridge.session.script import Script, Wait, drive_async, drive_blocking

_innermost: ContextVar[Step | None] = ContextVar("wbridge_step", default=None)
"""The step entered last in this task or thread, or in the task that started it; it may have ended."""


class Step:
    """One forward pass, as a context manager of either kind; gives the version it runs with.

    A step inside another one, in the same task or thread or in a task started there, begins at once and
    runs with the same version.
    """

    def __init__(
        self,
        gate: StepGate,
        version: Callable[[], int | None],
        on_success: Callable[[], None] | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        """`on_end` is called in the thread that leaves the step, also if it has failed."""
        self._gate = gate
        self._version = version
        self._on_success = on_success
        self._on_end = on_end
        self._outer: Step | None = None
        self._is_open = False
        self._thread = 0
        self._task: int | None = None

    def _enter(self, *, blocking: bool) -> Script[int | None]:
        if self._is_open:
            raise ProtocolError("this step is open already; call step() for each forward pass")
        self._outer = _open_step(_innermost.get())
        self._thread, self._task = threading.get_ident(), _current_task()
        is_nested = _find(self._outer, self._gate) is not None
        entered = self._gate.enter(self._thread, blocking=blocking, is_nested=is_nested)
        if entered is not None:
            try:
                yield Wait(entered)
            except BaseException:  # a cancellation; raised again
                self._gate.give_up(entered)
                raise
        try:
            version = self._version()
        except BaseException:  # whatever it is, the step was not entered; raised again
            self._gate.leave(self._thread)
            raise
        self._is_open = True
        _innermost.set(self)
        return version

    def _leave(self, kind: type[BaseException] | None) -> None:
        try:
            if self._on_end is not None:
                self._on_end()
            if kind is None and self._on_success is not None:
                self._on_success()
        finally:
            self._is_open = False
            self._outer = _open_step(self._outer)  # a task started here keeps this step, and not all before
            if _innermost.get() is self:
                _innermost.set(self._outer)
            self._gate.leave(self._thread)

    def __enter__(self) -> int | None:
        return drive_blocking(self._enter(blocking=True))

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(kind)

    async def __aenter__(self) -> int | None:
        return await drive_async(self._enter(blocking=False))

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(kind)


def is_inside_step(gate: StepGate) -> bool:
    """Whether the calling thread or task itself has a step of `gate` open, and not a task that started it."""
    step = _find(_open_step(_innermost.get()), gate)
    while step is not None:
        if (step._thread, step._task) == (threading.get_ident(), _current_task()):
            return True
        step = _find(_open_step(step._outer), gate)
    return False


def _current_task() -> int | None:
    try:
        return anyio.get_current_task().id
    except RuntimeError:  # no event loop runs in this thread
        return None


def _open_step(step: Step | None) -> Step | None:
    while step is not None and not step._is_open:
        step = step._outer
    return step


def _find(step: Step | None, gate: StepGate) -> Step | None:
    while step is not None and not (step._is_open and step._gate is gate):
        step = step._outer
    return step


def misplaced_poll(worker: WorkerId, *, is_second: bool) -> ProtocolError:
    """Why a poll cannot begin here: another one has not ended, or a step that it would wait for."""
    if is_second:
        return ProtocolError(
            f"{worker}: poll_requests() while another one has not returned; let one task or thread poll,"
            " and tell others what it returns"
        )
    return ProtocolError(
        f"{worker}: poll_requests() inside step() would wait for its own step to end; poll between steps"
    )
