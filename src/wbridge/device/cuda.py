"""CudaDevice: the same protocol on CUDA streams, events, and memory that other processes can be let into."""

from __future__ import annotations

import asyncio
import functools
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Final

import anyio
import torch

from wbridge.device.base import HOST, Access, Event, MemoryKind, PeerMemory
from wbridge.device.cpu import CpuDevice, CpuStream
from wbridge.device.cuda_driver import (
    IDLE_STREAMS,
    DriverError,
    relaxed,
    ring_behind,
    why_missing,
    why_no_rings,
)
from wbridge.device.cuda_memory import GpuMemory, tensor_at, why_not_shared
from wbridge.device.memory import ForeignMemory, HostMemory
from wbridge.device.wakeup import Bell
from wbridge.errors import ConfigError, InternalError, NativeUnavailable

_FIRST_POLL_S: Final = 50e-6
_LAST_POLL_S: Final = 200e-6
_HIGH: Final = -1
"""Somebody waits for the work: it goes before the application's, whose streams have 0 by default."""
_LOW: Final = 0


class CudaDevice:
    """One GPU. Work is enqueued by the submitting thread; the GPU runs it later.

    `copy_threads`: see `CpuDevice`, which runs the copies inside the host's memory.

    Raises:
        NativeUnavailable: this torch has no CUDA.
        ConfigError: there is no such GPU.
    """

    def __init__(self, index: int | None = None, *, copy_threads: int = 0) -> None:
        if not torch.cuda.is_available():
            raise NativeUnavailable(
                "parameters on cuda need a visible GPU and a torch built with CUDA: see PyTorch's install "
                "page, or keep the parameters on the CPU"
            )
        self.index: int = torch.cuda.current_device() if index is None else index
        if not 0 <= self.index < torch.cuda.device_count():
            raise ConfigError(f"cuda:{self.index}: this process sees {torch.cuda.device_count()} GPUs")
        self._host = CpuDevice(copy_threads=copy_threads)
        self._streams: list[CudaStream] = []
        self._rings = Rings(self.index)

    @property
    def name(self) -> str:
        return f"cuda:{self.index}"

    def allocate(self, nbytes: int, kind: MemoryKind, *, shared: bool = False) -> CudaBuffer:
        """See `Device.allocate`. Nobody is let into the GPU's memory where `find_access` says so."""
        if kind == "pinned":
            host = HostMemory(nbytes, shared=shared)
            return CudaBuffer(_pin(host, self.index), host, self.index)
        with relaxed():
            return self._allocate_there(nbytes)

    def _allocate_there(self, nbytes: int) -> CudaBuffer:
        memory = None
        if nbytes and why_not_shared(self.index) is None:
            memory = GpuMemory.allocate(self.index, nbytes)
        stream = _take_stream(self.index, _HIGH)  # one of ours, so that nobody else's work is waited for
        with torch.cuda.stream(stream):
            if memory is None:
                tensor = torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", self.index))
            else:
                tensor = memory.tensor()
            tensor.zero_()
        _record(stream).synchronize()
        _give_back(self.index, _HIGH, stream)
        return CudaBuffer(tensor, memory, self.index)

    def adopt(self, memory: PeerMemory) -> CudaBuffer:
        if isinstance(memory, memoryview):
            foreign = ForeignMemory(memory)
            return CudaBuffer(_pin(foreign, self.index), foreign, self.index)
        try:
            opened = GpuMemory.open(self.index, memory.descriptor, memory.nbytes)
            return CudaBuffer(opened.tensor(), opened, self.index)
        except DriverError as exc:
            raise NativeUnavailable(
                f"{self.name}: cannot open the slots of a receiver on a GPU: {exc}; set transport='ucxx', "
                "or checksum='on', which keeps slots in host memory"
            ) from exc

    def open_stream(
        self, name: str, *, background: bool = False, on_host: bool = False
    ) -> CudaStream | CpuStream:
        if on_host:
            return self._host.open_stream(name, background=background)
        priority = _LOW if background else _HIGH
        stream = CudaStream(_take_stream(self.index, priority), self._rings, priority)
        self._streams.append(stream)
        return stream

    def current_stream(self) -> CudaStream:
        return CudaStream(torch.cuda.current_stream(self.index), self._rings, _LOW)

    def close(self) -> None:
        """Wait for the work of all streams opened here. Blocks; idempotent."""
        self._host.close()
        while self._streams:
            stream = self._streams.pop()
            _record(stream.handle).synchronize()
            _give_back(self.index, stream.priority, stream.handle)
        self._rings.close()


def find_access(name: str) -> Access:
    """Say where the memory of the GPU with this torch name lies, and which memories work on it can write."""
    index = CudaDevice(int(name.partition(":")[2]) if ":" in name else None).index
    if why_not_shared(index) is not None:
        return Access(memory="")
    peers = range(torch.cuda.device_count())
    near = [peer for peer in peers if peer == index or torch.cuda.can_device_access_peer(index, peer)]
    return Access(memory=_identity(index), writes=(HOST, *map(_identity, near)))


def _identity(index: int) -> str:
    return f"GPU {torch.cuda.get_device_properties(index).uuid}"


class CudaBuffer:
    """Memory of the GPU, or host memory that is page-locked."""

    def __init__(
        self, tensor: torch.Tensor, memory: GpuMemory | HostMemory | ForeignMemory | None, index: int
    ) -> None:
        """`memory`: what `tensor` lies in, unless in torch's own memory of the GPU."""
        self._index = index
        self._tensor = tensor
        self._memory = memory

    @property
    def nbytes(self) -> int:
        return self._tensor.numel()

    @property
    def kind(self) -> MemoryKind:
        return "pinned" if self.is_host else "device"

    @property
    def descriptor(self) -> int | None:
        return None if self._memory is None else self._memory.descriptor

    @property
    def is_host(self) -> bool:
        return isinstance(self._memory, HostMemory | ForeignMemory)

    @property
    def view(self) -> memoryview:
        if isinstance(self._memory, HostMemory | ForeignMemory):
            return self._memory.view
        raise NativeUnavailable(
            "the host was to read or write memory of a GPU, which only copies in a stream can; "
            "choose a mode with pinned receivers, such as receiver_overlap or async"
        )

    @property
    def addresses(self) -> memoryview:
        if isinstance(self._memory, GpuMemory):
            return self._memory.addresses
        return self.view if self.nbytes else memoryview(bytearray())

    @property
    def tensor(self) -> torch.Tensor:
        return self._tensor

    @property
    def device_tensor(self) -> torch.Tensor:
        if self._tensor.is_cuda:
            return self._tensor
        where = torch.device("cuda", self._index)
        return tensor_at(self._tensor.data_ptr(), self.nbytes, where, keep=self)


def _pin(memory: HostMemory | ForeignMemory, index: int) -> torch.Tensor:
    """Page-lock host memory for as long as it lives; return it as a tensor."""
    if not memory.view.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    tensor = torch.frombuffer(memory.view, dtype=torch.uint8)
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch has no hints here
    # Without the device a thread of ours would start to use the first GPU too.
    with relaxed(), torch.cuda.device(index):
        torch.cuda.check_error(runtime.cudaHostRegister(tensor.data_ptr(), tensor.numel(), 0))
    weakref.finalize(memory.resources, _unpin, runtime, tensor.data_ptr())
    return tensor


def _unpin(runtime: ModuleType, address: int) -> None:
    """Also at the end of the process, when the driver may have ended already."""
    with suppress(DriverError), relaxed():
        runtime.cudaHostUnregister(address)


def _take_stream(index: int, priority: int) -> torch.cuda.Stream:
    if why_missing() is not None:  # one of the few that torch hands out in turn
        return torch.cuda.Stream(device=index, priority=priority)  # type: ignore[no-untyped-call]  # as above
    handle = IDLE_STREAMS.take(index, priority)
    return torch.cuda.ExternalStream(handle, device=index)  # type: ignore[no-untyped-call]  # as above


def _give_back(index: int, priority: int, stream: torch.cuda.Stream) -> None:
    if isinstance(stream, torch.cuda.ExternalStream):
        IDLE_STREAMS.give_back(index, priority, stream.cuda_stream)


def _record(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # as above
    event.record(stream)
    return event


class CudaStream:
    """A stream of ours or the application's. `submit` runs `work` at once, with this stream current: what it
    launches runs later.

    A copy between two host buffers launches nothing: it is over when `submit` returns. Work that raises may
    have launched something before, so those who wait for the next event get its error when that is over.
    """

    def __init__(self, handle: torch.cuda.Stream, rings: Rings, priority: int) -> None:
        self.handle = handle
        self.priority = priority
        self._rings = rings
        self._error: Exception | None = None

    def submit(self, work: Callable[[], None]) -> None:
        if self._error is None:
            try:
                with torch.cuda.stream(self.handle):
                    work()
            except Exception as exc:  # a task boundary: the next event raises it
                self._error = exc

    def record(self) -> CudaEvent:
        error, self._error = self._error, None
        return CudaEvent(_record(self.handle), self.handle.cuda_stream, self._rings, error)

    def wait_event(self, event: Event) -> None:
        if not isinstance(event, CudaEvent):
            raise InternalError(f"a CUDA stream cannot wait for a {type(event).__name__}")
        self.handle.wait_event(event.handle)

    def close(self) -> None:
        """Nothing to do: the device takes its streams back when it is closed."""


class CudaEvent:
    """A mark in the stream whose address `stream` is. `error` is what work before it raised."""

    def __init__(
        self, handle: torch.cuda.Event, stream: int, rings: Rings, error: Exception | None = None
    ) -> None:
        self.handle = handle
        self._stream = stream
        self._rings = rings
        self._error = error

    def is_done(self) -> bool:
        with relaxed():
            return bool(self.handle.query())  # type: ignore[no-untyped-call]  # torch has no hints here

    async def wait(self) -> None:
        if not self.is_done():
            await self._rings.wait(self, self._stream)
        self._raise_if_failed()

    def synchronize(self) -> None:
        with relaxed():
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
                self._streams[stream] = _take_stream(self._index, _HIGH)
            ringing = self._streams[stream]
            ringing.wait_event(event.handle)
            ring_behind(self._index, ringing.cuda_stream, bell.descriptor)

    def close(self) -> None:
        """Return when no bell will be rung any more. Who still waits then looks again and again."""
        with self._lock:
            self._is_closed = True
        while self._streams:
            _, stream = self._streams.popitem()
            _record(stream).synchronize()
            _give_back(self._index, _HIGH, stream)
        while self._bells:
            _, bell = self._bells.popitem()
            bell.close()


async def _poll(event: CudaEvent) -> None:
    """With a capped back-off: without the extension nothing tells."""
    pause_s = _FIRST_POLL_S
    while not event.is_done():
        await anyio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LAST_POLL_S)
