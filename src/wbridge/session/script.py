"""Public methods written once as scripts, and the two ways to drive them: awaiting or blocking."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Generator
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

import anyio

from wbridge.device.wakeup import Wakeup

T = TypeVar("T")


class Wait:
    """A step: wait for `future`, whose result is sent back into the script.

    `on_cancel` runs when the caller is cancelled meanwhile; the wait then goes on until the future is
    done, the script is driven to its end, and only then is the cancellation raised. Without it a
    cancelled caller just stops waiting, and the cancellation is raised inside the script.

    After `timeout_s` the wait raises `TimeoutError` inside the script; None: never.
    """

    def __init__(
        self,
        future: Future[Any],
        on_cancel: Callable[[], None] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> None:
        self.future = future
        self.on_cancel = on_cancel
        self.timeout_s = timeout_s


class Run:
    """A step: run `hook(*args)` in the caller's context (await it, if it is async)."""

    def __init__(self, hook: Callable[..., object], *args: object) -> None:
        self.hook = hook
        self.args = args


Script = Generator[Wait | Run, Any, T]  # Any: each step has its own result type


async def drive_async(script: Script[T]) -> T:
    """Perform a script's steps without blocking the caller's loop.

    Cancelled: asks the current step to stop, drives the script to its end, then raises the cancellation.
    """
    value: Any = None  # what the last step gave
    error: BaseException | None = None
    cancelled: BaseException | None = None
    try:
        while True:
            step = script.send(value) if error is None else script.throw(error)
            value, error = None, None
            try:
                with anyio.CancelScope(shield=cancelled is not None):
                    value = await _perform(step)
            except anyio.get_cancelled_exc_class() as exc:
                cancelled = exc
                value, error = await _stop(step, exc)
            except Exception as exc:  # handed to the script, which raises it
                error = exc
    except StopIteration as stop:
        if cancelled is None:
            result: T = stop.value
            return result
    except BaseException:  # a cancellation that came first wins over it
        if cancelled is None:
            raise
    raise cancelled


async def _perform(step: Wait | Run) -> object:
    if isinstance(step, Wait):
        with anyio.fail_after(step.timeout_s):
            await _done(step.future)
        return step.future.result()
    result = step.hook(*step.args)
    return await result if inspect.isawaitable(result) else result


async def _done(future: Future[Any]) -> None:
    """Return when `future` is done, however it ended."""
    if future.done():
        return
    done = Wakeup()  # the future may end in any thread, this one included
    future.add_done_callback(lambda _: done.set())
    await done.wait()


async def _stop(step: Wait | Run, cancelled: BaseException) -> tuple[object, BaseException | None]:
    """Ask a step to stop, wait until it has, and return how it ended: its value or its error."""
    if isinstance(step, Run) or step.on_cancel is None:
        return None, cancelled
    step.on_cancel()
    with anyio.CancelScope(shield=True):
        while not step.future.done():
            with contextlib.suppress(
                anyio.get_cancelled_exc_class()
            ):  # a second cancellation changes nothing
                await _done(step.future)
    return _ended(step.future)


def first_done(*futures: Future[Any]) -> Future[None]:  # Any: whatever their results are
    """Return a future that is done as soon as one of `futures` is, however that ended."""
    first: Future[None] = Future()

    def note(_: Future[Any]) -> None:  # Any: as above
        with contextlib.suppress(InvalidStateError):  # another one was first
            first.set_result(None)

    for future in futures:
        future.add_done_callback(note)
    return first


def _ended(future: Future[Any]) -> tuple[object, BaseException | None]:
    error = future.exception()
    return (None, error) if error else (future.result(), None)


def drive_blocking(script: Script[T]) -> T:
    """Perform a script's steps in this thread. An interrupt asks the current step to stop, then waits for it.

    Raises:
        TypeError: a hook is async; use the async adapter.
    """
    value: Any = None  # what the last step gave
    error: BaseException | None = None
    interrupted: KeyboardInterrupt | None = None
    try:
        while True:
            step = script.send(value) if error is None else script.throw(error)
            value, error = None, None
            try:
                value = _block(step)
            except KeyboardInterrupt as exc:
                interrupted = error = exc
                if isinstance(step, Wait) and step.on_cancel is not None:
                    step.on_cancel()
                    value, error = _ended(step.future)
            except Exception as exc:  # handed to the script, which raises it
                error = exc
    except StopIteration as stop:
        if interrupted is None:
            result: T = stop.value
            return result
    except BaseException:  # a cancellation that came first wins over it
        if interrupted is None:
            raise
    raise interrupted


def _block(step: Wait | Run) -> object:
    if isinstance(step, Wait):
        return step.future.result(step.timeout_s)
    result = step.hook(*step.args)
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()  # or Python warns that it was never awaited
        raise TypeError(f"{step.hook!r} is async; the blocking adapter needs a plain function")
    return result
