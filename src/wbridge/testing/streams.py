"""LoopDevice: the CPU device without threads; its streams run in the event loop, as late as allowed."""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Callable
from typing import Final

import anyio

from wbridge.device.base import Buffer, Event, ForeignStream, MemoryKind, PeerMemory, Stream
from wbridge.device.cpu import CpuDevice
from wbridge.errors import EndpointClosed


class LoopDevice:
    """Host memory whose streams sit on their work until somebody waits for it, and for `delay_s` more.

    The same in every run. A cancelled wait leaves the work to run as it would have, so memory that
    is given back too early is written or read after that.
    """

    def __init__(self, *, delay_s: float = 0.001) -> None:
        self._cpu = CpuDevice()
        self._delay_s = delay_s
        self._streams: list[LoopStream] = []

    @property
    def name(self) -> str:
        return self._cpu.name

    @property
    def num_open(self) -> int:
        """Streams that were not closed."""
        return sum(not stream.is_closed for stream in self._streams)

    @property
    def num_pending(self) -> int:
        """Submissions that have not run."""
        return sum(len(stream.queue) for stream in self._streams)

    def allocate(self, nbytes: int, kind: MemoryKind, *, shared: bool = False) -> Buffer:
        return self._cpu.allocate(nbytes, kind, shared=shared)

    def adopt(self, memory: PeerMemory) -> Buffer:
        return self._cpu.adopt(memory)

    def open_stream(self, name: str, *, background: bool = False, on_host: bool = False) -> LoopStream:
        self._streams.append(LoopStream(name, self._delay_s))
        return self._streams[-1]

    def current_stream(self) -> Stream:
        return self._cpu.current_stream()

    def wrap_stream(self, stream: ForeignStream) -> Stream:
        return self._cpu.wrap_stream(stream)

    def close(self) -> None:
        """Run all submitted work and end all streams. Idempotent."""
        for stream in self._streams:
            stream.close()
            stream.run(stream.num_submitted)


class LoopStream:
    """A queue of work that the loop runs in order."""

    is_capturing: Final = False

    def __init__(self, name: str, delay_s: float) -> None:
        self.name = name
        self.is_closed = False
        self.queue: deque[Callable[[], None] | LoopEvent] = deque()
        self.num_submitted = 0
        self._num_run = 0
        self._delay_s = delay_s
        self._error: Exception | None = None

    def submit(self, work: Callable[[], None]) -> None:
        self._append(work)

    def record(self) -> LoopEvent:
        event = LoopEvent(self, self.num_submitted + 1)
        self._append(event)
        return event

    def wait_event(self, event: Event) -> None:
        self.submit(event.synchronize)

    def close(self) -> None:
        """What was submitted still runs, a moment later."""
        if not self.is_closed and self.queue:
            self.demand(self.num_submitted)
        self.is_closed = True

    def demand(self, position: int) -> None:
        """Run everything up to the `position`-th submission a moment later."""
        asyncio.get_running_loop().call_later(self._delay_s, functools.partial(self.run, position))

    def run(self, position: int) -> None:
        while self.queue and self._num_run < position:
            item = self.queue.popleft()
            self._num_run += 1
            if isinstance(item, LoopEvent):
                item.finish(self._error)
                self._error = None
            elif self._error is None:
                try:
                    item()
                except Exception as exc:  # a task boundary: the next event raises it
                    self._error = exc

    def _append(self, item: Callable[[], None] | LoopEvent) -> None:
        if self.is_closed:
            raise EndpointClosed(f"stream {self.name!r} is closed; open a new device")
        self.queue.append(item)
        self.num_submitted += 1


class LoopEvent:
    """A mark in a stream. Waiting for it is what makes the work before it run."""

    def __init__(self, stream: LoopStream, position: int) -> None:
        self._stream = stream
        self._position = position
        self._done: anyio.Event = anyio.Event()
        self._error: Exception | None = None

    def is_done(self) -> bool:
        return self._done.is_set()

    async def wait(self) -> None:
        if not self._done.is_set():
            self._stream.demand(self._position)
        await self._done.wait()
        self._raise_if_failed()

    def synchronize(self) -> None:
        self._stream.run(self._position)
        self._raise_if_failed()

    def finish(self, error: Exception | None) -> None:
        self._error = error
        self._done.set()

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise self._error
