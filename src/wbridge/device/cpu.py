"""CpuDevice: streams that really are asynchronous, so that a missing wait shows without a GPU."""

from __future__ import annotations

import os
import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, Literal

import torch

from wbridge.device.base import Event, ForeignStream, MemoryKind, PeerMemory, Stream
from wbridge.device.memory import ExportedMemory, ForeignMemory, HostMemory
from wbridge.device.wakeup import Wakeup
from wbridge.errors import ConfigError, EndpointClosed, NativeUnavailable
from wbridge.native.extension import set_copy_threads

_MAX_HELD: Final = 64
_BACKGROUND_NICE: Final = 15
"""Runs when a core is idle, and a little even when none is."""


class CpuDevice:
    """Host memory with one worker thread per stream.

    Without a `seed` a stream runs its work as soon as it can. With one, a stream sits on its work
    until someone waits for an event at or after it, except where a generator seeded with `seed`
    (and the stream's name) lets some of it run inside a `submit`: the order of everything is then
    the same in every run, and work is as late as a real device may make it. At most `max_held`
    submissions are held back.

    A large copy shares its work with `copy_threads` - 1 threads that all devices of the process have in
    common; 0 leaves the bound as it is.
    """

    def __init__(self, *, seed: int | None = None, max_held: int = _MAX_HELD, copy_threads: int = 0) -> None:
        if copy_threads:
            set_copy_threads(copy_threads)
        self._seed = seed
        self._max_held = max_held
        self._lock = threading.Lock()
        self._streams: list[CpuStream] = []
        self._closed = False

    @property
    def name(self) -> str:
        return "cpu"

    def allocate(self, nbytes: int, kind: MemoryKind, *, shared: bool = False) -> CpuBuffer:
        return CpuBuffer(nbytes, kind, shared=shared)

    def adopt(self, memory: PeerMemory) -> CpuBuffer:
        if isinstance(memory, ExportedMemory):
            raise NativeUnavailable(
                "a receiver's slots lie on a GPU, which no copy from the host reaches; "
                "set receiver_overlap or async as the mode"
            )
        return CpuBuffer(memory.nbytes, "pinned", memory=ForeignMemory(memory))

    def open_stream(self, name: str, *, background: bool = False, on_host: bool = False) -> CpuStream:
        """Start a stream with its own thread; `close` of the device ends it."""
        release = None if self._seed is None else _Release(f"{self._seed}/{name}", self._max_held)
        stream = CpuStream(name, release, background=background)
        with self._lock:
            if self._closed:
                raise EndpointClosed(f"stream {name!r}: the cpu device is closed; open a new device")
            self._streams = [stream for stream in self._streams if stream.is_alive()]
            self._streams.append(stream)
            stream.start()
        return stream

    def current_stream(self) -> CallerStream:
        """The caller's own work on a CPU is synchronous, so it is done at once; see `CallerStream`."""
        return CallerStream()

    def wrap_stream(self, stream: ForeignStream) -> Stream:
        raise ConfigError(
            f"a {type(stream).__name__} orders work on a GPU, the parameters are on the host; leave it out"
        )

    def close(self) -> None:
        """Run all submitted work, then end all threads. Blocks; idempotent."""
        with self._lock:
            self._closed = True
            streams = list(self._streams)
        for stream in streams:
            stream.close()
        for stream in streams:
            stream.join()


class CpuBuffer:
    """Host memory: `memory`, or some of its own."""

    def __init__(
        self,
        nbytes: int,
        kind: MemoryKind,
        *,
        shared: bool = False,
        memory: HostMemory | ForeignMemory | None = None,
    ) -> None:
        self._kind = kind
        self._memory = memory or HostMemory(nbytes, shared=shared)
        # torch.frombuffer accepts no empty buffer.
        self._tensor = torch.frombuffer(self._memory.view, dtype=torch.uint8) if nbytes else _empty()

    @property
    def nbytes(self) -> int:
        return self._memory.view.nbytes

    @property
    def kind(self) -> MemoryKind:
        return self._kind

    @property
    def descriptor(self) -> int | None:
        return self._memory.descriptor

    @property
    def is_host(self) -> Literal[True]:
        return True

    @property
    def view(self) -> memoryview:
        return self._memory.view

    @property
    def addresses(self) -> memoryview:
        return self._memory.view

    @property
    def tensor(self) -> torch.Tensor:
        return self._tensor

    @property
    def device_tensor(self) -> torch.Tensor:
        return self.tensor


def _empty() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)


class _Release:
    """Decides how much held work runs at a submission: seeded, the same in every run."""

    def __init__(self, seed: str, max_held: int) -> None:
        self._random = random.Random(seed)
        self._max_held = max_held

    def __call__(self, num_held: int) -> int:
        if num_held > self._max_held:
            return num_held - self._max_held
        return self._random.randint(1, num_held) if self._random.random() < 0.25 else 0


class CpuStream:
    """A queue of work run in order by one thread, in the `background` at a low priority.

    Work that raises skips the work up to the next recorded event, which raises that error to those
    who wait for it; what follows the event runs again.
    """

    is_capturing: Final = False

    def __init__(self, name: str, release: Callable[[int], int] | None, *, background: bool = False) -> None:
        self.name = name
        self._background = background
        self._release = release
        self._changed = threading.Condition()
        self._queue: deque[Callable[[], None] | CpuEvent] = deque()
        self._num_submitted = 0
        self._num_finished = 0
        self._num_allowed = 0
        self._stopping = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"wbridge-stream-{name}", daemon=True)

    def submit(self, work: Callable[[], None]) -> None:
        with self._changed:
            self._append(work)
            if self._release is None:
                self._allow(self._num_submitted)
                return
            released = self._release(self._num_submitted - self._num_allowed)
            if released:
                target = self._num_allowed + released
                self._allow(target)
                # Waiting here, not running on, is what makes a seeded run repeatable.
                self._changed.wait_for(lambda: self._num_finished >= target)

    def record(self) -> CpuEvent:
        with self._changed:
            event = CpuEvent(self, self._num_submitted + 1)
            self._append(event)
            if self._release is None:
                self._allow(self._num_submitted)
        return event

    def wait_event(self, event: Event) -> None:
        if not isinstance(event, DoneEvent):
            self.submit(event.synchronize)

    def demand(self, position: int) -> None:
        """Let everything up to the `position`-th submission run."""
        with self._changed:
            self._allow(position)

    @property
    def is_idle(self) -> bool:
        """What the caller does itself now comes behind all that was submitted."""
        with self._changed:
            is_through = self._num_finished == self._num_submitted and self._error is None
            return is_through and not (self._stopping or self._release)

    def start(self) -> None:
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        with self._changed:
            self._stopping = True
            self._allow(self._num_submitted)

    def join(self) -> None:
        self._thread.join()

    def _append(self, item: Callable[[], None] | CpuEvent) -> None:
        if self._stopping:
            raise EndpointClosed(f"stream {self.name!r} is closed; open a new device")
        self._queue.append(item)
        self._num_submitted += 1

    def _allow(self, position: int) -> None:
        self._num_allowed = max(self._num_allowed, position)
        self._changed.notify_all()

    def _run(self) -> None:
        if self._background:
            thread = threading.get_native_id()
            lower = max(_BACKGROUND_NICE, os.getpriority(os.PRIO_PROCESS, thread))
            os.setpriority(os.PRIO_PROCESS, thread, lower)
        while (item := self._next()) is not None:
            if isinstance(item, CpuEvent):
                item.finish(self._error)
                self._error = None
            elif self._error is None:
                try:
                    item()
                except Exception as exc:  # a task boundary: the next event re-raises it
                    self._error = exc
            del item  # the work's tensors must not outlive it
            with self._changed:
                self._num_finished += 1
                self._changed.notify_all()

    def _next(self) -> Callable[[], None] | CpuEvent | None:
        with self._changed:
            self._changed.wait_for(lambda: self._num_allowed > self._num_finished or self._stopping)
            return self._queue.popleft() if self._queue else None


class CpuEvent:
    """A mark in a stream. Waiting for it is what makes held work run."""

    def __init__(self, stream: CpuStream, position: int) -> None:
        self._stream: CpuStream | None = stream
        self._position = position
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._waiters: list[Wakeup] = []

    def is_done(self) -> bool:
        return self._done.is_set()

    async def wait(self) -> None:
        if not self._done.is_set():
            wakeup = Wakeup()
            with self._lock:
                if self._done.is_set():
                    wakeup.set()
                else:
                    self._waiters.append(wakeup)
            self._demand()
            await wakeup.wait()
        self._raise_if_failed()

    def synchronize(self) -> None:
        self._demand()
        self._done.wait()
        self._raise_if_failed()

    def finish(self, error: BaseException | None) -> None:
        """Called by the stream's thread when everything before the mark has run."""
        with self._lock:
            self._error = error
            self._done.set()
            waiters, self._waiters = self._waiters, []
        for wakeup in waiters:
            wakeup.set()
        self._stream = None

    def _demand(self) -> None:
        stream = self._stream
        if stream is not None:
            stream.demand(self._position)

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise self._error


class CallerStream:
    """The calling thread as a stream: work runs at once, and `wait_event` blocks the caller.

    Its events are done when recorded: what the caller submitted to a CPU has already happened.
    """

    is_capturing: Final = False

    def submit(self, work: Callable[[], None]) -> None:
        work()

    def record(self) -> DoneEvent:
        return DoneEvent()

    def wait_event(self, event: Event) -> None:
        event.synchronize()

    def close(self) -> None:
        return


class DoneEvent:
    """An event of the past."""

    def is_done(self) -> bool:
        return True

    async def wait(self) -> None:
        return

    def synchronize(self) -> None:
        return
