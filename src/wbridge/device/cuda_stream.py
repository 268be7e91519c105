"""CudaStream, CudaEvent, Rings: work in order on one GPU, and how an event loop hears that it is over."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

import anyio
import torch

from wbridge.device.base import Event
from wbridge.device.cuda_driver import (
    IDLE_STREAMS,
    DriverError,
    relaxed,
    ring_behind,
    why_missing,
    why_no_rings,
)
from wbridge.device.wakeup import Bell
from wbridge.errors import DeviceFailed, EndpointClosed, InternalError

HIGH: Final = -1
"""Somebody waits for the work: it goes before the application's, whose streams have 0 by default."""
LOW: Final = 0

_FIRST_POLL_S: Final = 50e-6
_LAST_POLL_S: Final = 200e-6

_log = logging.getLogger(__name__)


@contextmanager
def working_on(stream: torch.cuda.Stream) -> Iterator[None]:
    """Make a stream, and before it its GPU, current in this thread.

    A thread begins with the first GPU. Left to torch, leaving the stream of another one selects the first
    one again, and CUDA then takes hundreds of megabytes there.
    """
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


@contextmanager
def asking(stream: torch.cuda.Stream) -> Iterator[None]:
    """Ask the GPU of a stream, also while another thread captures a graph.

    Without the GPU made current, a thread of ours would start to use the first one too.

    Raises:
        DeviceFailed: the GPU answers no more.
    """
    try:
        with relaxed(), torch.cuda.device(stream.device):
            yield
    except RuntimeError as exc:  # torch's, or the driver's
        raise DeviceFailed(f"{stream.device}: {exc}; start this process again") from exc


def take_stream(index: int, priority: int) -> torch.cuda.Stream:
    if why_missing() is not None:  # one of the few that torch hands out in turn
        return torch.cuda.Stream(device=index, priority=priority)  # type: ignore[no-untyped-call]  # torch has no hints here
    handle = IDLE_STREAMS.take(index, priority)
    return torch.cuda.ExternalStream(handle, device=index)  # type: ignore[no-untyped-call]  # as above


def finish(index: int, priority: int, stream: torch.cuda.Stream) -> None:
    """Wait until all work in the stream is over, and let others have it. Blocks.

    A GPU that has failed ends no work and runs none: its stream is left as it is.
    """
    try:
        with relaxed(), torch.cuda.device(index):
            record(stream).synchronize()
    except RuntimeError as exc:  # torch's, or the driver's
        _log.warning("a stream of a GPU that has failed is left", extra={"gpu": index, "reason": str(exc)})
        return
    if isinstance(stream, torch.cuda.ExternalStream):
        IDLE_STREAMS.give_back(index, priority, stream.cuda_stream)


def record(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no hints here
    event.record(stream)
    return event


def upload(memory: torch.Tensor, index: int) -> torch.Tensor:
    """Return a copy on the GPU that every stream may use: it was made in one of ours, and is there."""
    stream = take_stream(index, HIGH)
    with relaxed(), working_on(stream):
        # Pinned, so that no whole stream is waited for.
        there = memory.pin_memory().to(torch.device("cuda", index), non_blocking=True)
    finish(index, HIGH, stream)
    return there


class CudaStream:
    """A stream of ours or the application's. `submit` runs `work` at once, with this stream current: what it
    launches runs later.

    A copy between two host buffers launches nothing: it is over when `submit` returns. Work that raises may
    have launched something before, so those who wait for the next event get its error when that is over.
    """

    def __init__(
        self,
        handle: torch.cuda.Stream,
        rings: Rings,
        close: Callable[[torch.cuda.Stream], None] | None = None,
    ) -> None:
        """`close` takes the handle back. None: it is the application's."""
        self.handle = handle
        self._rings = rings
        self._close = close
        self._is_closed = False
        self._error: Exception | None = None

    @property
    def is_capturing(self) -> bool:
        with working_on(self.handle):
            return torch.cuda.is_current_stream_capturing()

    def submit(self, work: Callable[[], None]) -> None:
        self._check_open()
        if self._error is None:
            try:
                with relaxed(), working_on(self.handle):  # it may be the first to ask torch for memory
                    work()
            except Exception as exc:  # a task boundary: the next event raises it
                self._error = exc

    def record(self) -> CudaEvent:
        self._check_open()
        error, self._error = self._error, None
        with asking(self.handle):
            return CudaEvent(record(self.handle), self.handle, self._rings, error)

    def wait_event(self, event: Event) -> None:
        self._check_open()
        if not isinstance(event, CudaEvent):
            raise InternalError(f"a CUDA stream cannot wait for a {type(event).__name__}")
        with asking(self.handle):
            self.handle.wait_event(event.handle)

    def close(self) -> None:
        """The next stream that is opened may be this one: its work then runs behind what is left here."""
        if not self._is_closed and self._close is not None:
            self._is_closed = True
            self._close(self.handle)

    def _check_open(self) -> None:
        if self._is_closed:
            raise EndpointClosed("a stream of a GPU is closed; open a new one")


class CudaEvent:
    """A mark in `stream`. `error` is what work before it raised."""

    def __init__(
        self,
        handle: torch.cuda.Event,
        stream: torch.cuda.Stream,
        rings: Rings,
        error: Exception | None = None,
    ) -> None:
        self.handle = handle
        self._stream = stream
        self._rings = rings
        self._error = error

    def is_done(self) -> bool:
        with asking(self._stream):
            return bool(self.handle.query())  # type: ignore[no-untyped-call]  # torch has no hints here

    async def wait(self) -> None:
        if not self.is_done():
            await self._rings.wait(self, self._stream.cuda_stream)
        self._raise_if_failed()

    def synchronize(self) -> None:
        with asking(self._stream):
            self.handle.synchronize()
        self._raise_if_failed()

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise self._error


class Rings:
    """How those who await events of one GPU hear of them.

    Behind the event, a stream of ours calls a C function that writes an eventfd of the waiting loop. There
    is one such stream for each that events are recorded in: the call would hold up work in the stream itself,
    and in a common one an early event would wait behind a late one.

    Without the extension or cuda.bindings the event is looked at again and again, with a capped back-off.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._bells: dict[asyncio.AbstractEventLoop, Bell] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    async def wait(self, event: CudaEvent, stream: int) -> None:
        """Return when `event`, recorded in `stream`, is done."""
        if (bell := self._bell()) is not None:
            with suppress(DriverError):  # no room for a stream, say; the event itself may be well
                await bell.wait(event.is_done, functools.partial(self._ask, event, stream, bell))
        await _poll(event)

    def _bell(self) -> Bell | None:
        """The running loop's. None: nobody would ring it."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._is_closed or why_no_rings() is not None:
                return None
            if loop not in self._bells:
                self._bells[loop] = Bell()
            return self._bells[loop]

    def _ask(self, event: CudaEvent, stream: int, bell: Bell) -> None:
        with self._lock:
            if self._is_closed:  # by another thread, and the bell's descriptor may be another file's
                return
            if stream not in self._streams:
                self._streams[stream] = take_stream(self._index, HIGH)
            ringing = self._streams[stream]
            ringing.wait_event(event.handle)
            ring_behind(self._index, ringing.cuda_stream, bell.descriptor)

    def close(self) -> None:
        """Return when no bell will be rung any more. Who still waits then looks again and again."""
        with self._lock:
            self._is_closed = True
        while self._streams:
            _, stream = self._streams.popitem()
            finish(self._index, HIGH, stream)
        while self._bells:
            _, bell = self._bells.popitem()
            bell.close()


async def _poll(event: CudaEvent) -> None:
    """With a capped back-off: without the extension nothing tells."""
    pause_s = _FIRST_POLL_S
    while not event.is_done():
        await anyio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LAST_POLL_S)
