"""CudaDevice: the same protocol on CUDA streams, events, and memory that other processes can be let into."""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress
from typing import Final

import torch

from wbridge.device.base import HOST, Access, ForeignStream, MemoryKind, PeerMemory
from wbridge.device.cpu import CpuDevice, CpuStream
from wbridge.device.cuda_driver import DriverError, call, current, relaxed, why_missing
from wbridge.device.cuda_memory import GpuMemory, addresses_at, no_room, tensor_at, why_not_shared
from wbridge.device.cuda_stream import HIGH, LOW, CudaStream, Rings, finish, take_stream, working_on
from wbridge.device.memory import ForeignMemory, HostMemory
from wbridge.errors import ConfigError, EndpointClosed, NativeUnavailable

_PORTABLE: Final = 1
"""CU_MEMHOSTREGISTER_PORTABLE: for every GPU of the process."""
_MAPPED: Final = 2
"""CU_MEMHOSTREGISTER_DEVICEMAP: kernels reach it too."""


class CudaDevice:
    """One GPU. Work is enqueued by the submitting thread; the GPU runs it later.

    `copy_threads`: see `CpuDevice`, which runs the copies inside the host's memory.

    Raises:
        NativeUnavailable: this torch has no CUDA.
        ConfigError: there is no such GPU.
    """

    def __init__(self, index: int | None = None, *, copy_threads: int = 0) -> None:
        if torch.cuda._is_in_bad_fork():
            raise NativeUnavailable(
                "this process was forked from one that uses a GPU, which CUDA does not survive; start "
                "processes by `spawn`, or before the GPU is used"
            )
        if not torch.cuda.is_available():
            raise NativeUnavailable(
                "parameters on cuda need a visible GPU and a torch built with CUDA: see PyTorch's install "
                "page, or keep the parameters on the CPU"
            )
        self.index: int = torch.cuda.current_device() if index is None else index
        if not 0 <= self.index < torch.cuda.device_count():
            raise ConfigError(f"cuda:{self.index}: this process sees {torch.cuda.device_count()} GPUs")
        self._host = CpuDevice(copy_threads=copy_threads)
        self._rings = Rings(self.index)
        self._lock = threading.Lock()
        self._streams: list[tuple[int, torch.cuda.Stream]] = []  # with their priorities
        self._idle: dict[int, list[torch.cuda.Stream]] = {HIGH: [], LOW: []}  # that were closed
        self._is_closed = False

    @property
    def name(self) -> str:
        return f"cuda:{self.index}"

    def allocate(self, nbytes: int, kind: MemoryKind, *, shared: bool = False) -> CudaBuffer:
        """See `Device.allocate`. Nobody is let into the GPU's memory where `find_access` says so.

        What is not shared is torch's, from `cudaMalloc`: the only memory that UCX's `cuda_ipc` exports.
        """
        if kind == "pinned":
            host = HostMemory(nbytes, shared=shared)
            return CudaBuffer(_pin(host, self.index), host, self.index)
        with relaxed():
            return self._allocate_there(nbytes, shared=shared)

    def _allocate_there(self, nbytes: int, *, shared: bool) -> CudaBuffer:
        memory = None
        if shared and nbytes and why_not_shared(self.index) is None:
            memory = GpuMemory.allocate(self.index, nbytes)
        stream = take_stream(self.index, HIGH)  # one of ours, so that nobody else's work is waited for
        try:
            with working_on(stream):
                if memory is None:
                    tensor = torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", self.index))
                else:
                    tensor = memory.tensor()
                tensor.zero_()
        except torch.OutOfMemoryError as exc:
            raise no_room(self.index, nbytes, str(exc)) from exc
        finally:
            finish(self.index, HIGH, stream)
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
        priority = LOW if background else HIGH
        idle = self._idle[priority]
        with self._lock:
            if self._is_closed:
                raise EndpointClosed(f"stream {name!r}: {self.name} is closed; open a new device")
            if not idle:
                idle.append(take_stream(self.index, priority))
                self._streams.append((priority, idle[-1]))
            return CudaStream(idle.pop(), self._rings, idle.append)

    def current_stream(self) -> CudaStream:
        return CudaStream(torch.cuda.current_stream(self.index), self._rings)

    def wrap_stream(self, stream: ForeignStream) -> CudaStream:
        if isinstance(stream, torch.cuda.Stream):
            if stream.device_index != self.index:
                raise ConfigError(f"a stream of {stream.device} does not order work on {self.name}")
            return CudaStream(stream, self._rings)
        _, handle = stream.__cuda_stream__()
        external = torch.cuda.ExternalStream(handle, device=self.index)  # type: ignore[no-untyped-call]  # torch has no hints here
        return CudaStream(external, self._rings)

    def close(self) -> None:
        """Wait for the work of all streams opened here. Blocks; idempotent."""
        self._host.close()
        with self._lock:
            self._is_closed = True
            streams, self._streams = self._streams, []
        for priority, stream in streams:
            finish(self.index, priority, stream)
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
        if not self.nbytes:
            return memoryview(bytearray())
        if self._memory is None:
            return addresses_at(self._tensor.data_ptr(), self.nbytes, keep=self._tensor)
        return self.view

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
    try:
        _page_lock(index, tensor.data_ptr(), tensor.numel())
    except RuntimeError as exc:  # the driver's, or torch's
        raise ConfigError(
            f"cuda:{index}: {tensor.numel()} bytes of host memory cannot be page-locked: {exc}; set a "
            "smaller num_slots, slot_nbytes or snapshot_versions, or raise the limit of locked memory"
        ) from exc
    weakref.finalize(memory.resources, _unpin, index, tensor.data_ptr())
    return tensor


def _page_lock(index: int, address: int, nbytes: int) -> None:
    """By the driver, whose failures are told once: the runtime reports them again at the next kernel that
    this thread launches for anybody."""
    if why_missing() is None:
        with current(index):
            call("cuMemHostRegister", address, nbytes, _PORTABLE | _MAPPED)
        return
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch has no hints here
    with torch.cuda.device(index):  # else a thread of ours would start to use the first GPU too
        torch.cuda.check_error(runtime.cudaHostRegister(address, nbytes, 0))


def _unpin(index: int, address: int) -> None:
    """Also at the end of the process, when the driver may have ended already."""
    with suppress(DriverError):
        if why_missing() is None:
            with current(index):
                call("cuMemHostUnregister", address)
        else:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]  # as above
