"""CudaDevice: the same protocol on torch's CUDA streams, events and pinned memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Final

import anyio
import torch

from wbridge.device.base import Event, MemoryKind
from wbridge.device.memory import ForeignMemory, HostMemory
from wbridge.errors import ConfigError, InternalError, NativeUnavailable

_FIRST_POLL_S: Final = 50e-6
_LAST_POLL_S: Final = 200e-6


class CudaDevice:
    """One GPU. Work is enqueued by the submitting thread; the GPU runs it later.

    Raises:
        NativeUnavailable: this torch has no CUDA.
        ConfigError: there is no such GPU.
    """

    def __init__(self, index: int | None = None) -> None:
        if not torch.cuda.is_available():
            raise NativeUnavailable(
                "parameters on cuda need a visible GPU and a torch built with CUDA: see PyTorch's install "
                "page, or keep the parameters on the CPU"
            )
        self._index = torch.cuda.current_device() if index is None else index
        if not 0 <= self._index < torch.cuda.device_count():
            raise ConfigError(f"cuda:{self._index}: this process sees {torch.cuda.device_count()} GPUs")
        self._streams: list[CudaStream] = []

    @property
    def name(self) -> str:
        return f"cuda:{self._index}"

    def allocate(self, nbytes: int, kind: MemoryKind, *, shared: bool = False) -> CudaBuffer:
        if kind == "device":
            where = torch.device("cuda", self._index)
            return CudaBuffer(torch.zeros(nbytes, dtype=torch.uint8, device=where), None)
        memory = HostMemory(nbytes, shared=shared)
        return CudaBuffer(_pin(memory, self._index), memory)

    def adopt(self, memory: memoryview) -> CudaBuffer:
        foreign = ForeignMemory(memory)
        return CudaBuffer(_pin(foreign, self._index), foreign)

    def open_stream(self, name: str, *, background: bool = False) -> CudaStream:
        handle = torch.cuda.Stream(device=self._index, priority=0 if background else -1)  # type: ignore[no-untyped-call]  # torch has no hints here
        stream = CudaStream(handle)
        self._streams.append(stream)
        return stream

    def current_stream(self) -> CudaStream:
        return CudaStream(torch.cuda.current_stream(self._index))

    def close(self) -> None:
        """Wait for the work of all streams opened here. Blocks; idempotent."""
        while self._streams:
            self._streams.pop().record().synchronize()


class CudaBuffer:
    """Device memory, or `host` memory that is page-locked."""

    def __init__(self, tensor: torch.Tensor, host: HostMemory | ForeignMemory | None) -> None:
        self._tensor = tensor
        self._host = host

    @property
    def nbytes(self) -> int:
        return self._tensor.numel()

    @property
    def kind(self) -> MemoryKind:
        return "device" if self._host is None else "pinned"

    @property
    def descriptor(self) -> int | None:
        return None if self._host is None else self._host.descriptor

    @property
    def view(self) -> memoryview:
        if self._host is None:
            raise NativeUnavailable(
                "slots in GPU memory need the native transport; choose a mode with pinned receivers, "
                "such as receiver_overlap or async"
            )
        return self._host.view

    @property
    def tensor(self) -> torch.Tensor:
        return self._tensor


def _pin(memory: HostMemory | ForeignMemory, index: int) -> torch.Tensor:
    """Page-lock host memory for as long as it lives; return it as a tensor."""
    if not memory.view.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    tensor = torch.frombuffer(memory.view, dtype=torch.uint8)
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch has no hints here
    with torch.cuda.device(index):  # else a thread of ours would start to use the first GPU too
        torch.cuda.check_error(runtime.cudaHostRegister(tensor.data_ptr(), tensor.numel(), 0))
    weakref.finalize(memory.resources, runtime.cudaHostUnregister, tensor.data_ptr())
    return tensor


class CudaStream:
    """A torch stream. `submit` runs `work` at once, with this stream current: what it launches runs later.

    A copy between two host buffers launches nothing: it is over when `submit` returns.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def submit(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def record(self) -> CudaEvent:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no hints here
        event.record(self._stream)
        return CudaEvent(event)

    def wait_event(self, event: Event) -> None:
        if not isinstance(event, CudaEvent):
            raise InternalError(f"a CUDA stream cannot wait for a {type(event).__name__}")
        self._stream.wait_event(event.handle)

    def close(self) -> None:
        """Nothing to do: torch owns its streams and uses them again."""


class CudaEvent:
    """A torch event."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.handle = event

    def is_done(self) -> bool:
        return bool(self.handle.query())  # type: ignore[no-untyped-call]  # torch has no hints here

    async def wait(self) -> None:
        """Poll with a capped back-off, only while the work runs: CUDA has no event that a loop can await."""
        pause_s = _FIRST_POLL_S
        while not self.is_done():
            await anyio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_POLL_S)

    def synchronize(self) -> None:
        self.handle.synchronize()
