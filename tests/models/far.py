"""FarDevice: the CPU device, but what it calls device memory crashes the process if the host touches it."""

from __future__ import annotations

import ctypes
import mmap
from typing import Final

import torch

from wbridge.device.base import HOST, Access, MemoryKind, PeerMemory
from wbridge.device.cpu import CpuBuffer, CpuDevice
from wbridge.device.memory import ExportedMemory, HostMemory
from wbridge.errors import NativeUnavailable

FAR: Final = Access(memory="GPU far", writes=(HOST, "GPU far"))

_PROT_NONE: Final = 0
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class FarDevice(CpuDevice):
    """What a GPU is to everything but copies: memory that other workers open by a descriptor, and addresses
    that nobody may follow. Copies go through `tensor`, so the tables must be torch's."""

    def allocate(self, nbytes: int, kind: MemoryKind, *, shared: bool = False) -> CpuBuffer:
        if kind == "pinned" or not nbytes:
            return super().allocate(nbytes, kind, shared=shared)
        memory = HostMemory(nbytes, shared=True)
        return FarBuffer(memory, torch.frombuffer(memory.view, dtype=torch.uint8))

    def adopt(self, memory: PeerMemory) -> CpuBuffer:
        if isinstance(memory, memoryview):
            return super().adopt(memory)
        opened = mmap.mmap(memory.descriptor, memory.nbytes)
        return FarBuffer(memory, torch.frombuffer(opened, dtype=torch.uint8))


class FarBuffer(CpuBuffer):
    def __init__(self, memory: HostMemory | ExportedMemory, tensor: torch.Tensor) -> None:
        self._far, self._bytes = memory, tensor
        assert memory.descriptor is not None
        addresses = mmap.mmap(memory.descriptor, tensor.numel())
        start = ctypes.addressof(ctypes.c_char.from_buffer(addresses))
        assert _libc.mprotect(start, len(addresses), _PROT_NONE) == 0
        self._addresses = memoryview(addresses)

    @property
    def nbytes(self) -> int:
        return self._bytes.numel()

    @property
    def kind(self) -> MemoryKind:
        return "device"

    @property
    def descriptor(self) -> int | None:
        return self._far.descriptor

    @property
    def is_host(self) -> bool:  # type: ignore[override]  # this is what is different
        return False

    @property
    def view(self) -> memoryview:
        raise NativeUnavailable("the host was to read or write far memory")

    @property
    def addresses(self) -> memoryview:
        return self._addresses

    @property
    def tensor(self) -> torch.Tensor:
        return self._bytes
