"""GpuMemory: memory of a GPU that other processes open by a descriptor, as they do with a memfd.

Whoever has opened it keeps it, whatever becomes of the process that allocated it. torch's allocator knows
nothing of it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from collections import deque
from contextlib import suppress
from typing import Any, Final, Self

import torch

from wbridge.device.cuda_driver import DriverError, attribute, call, constant, current, struct, why_missing
from wbridge.device.memory import Resources
from wbridge.errors import ConfigError

_PROBE: Final = 7
_PROBE_NBYTES: Final = 64
_WRITTEN_BY_CARDS: Final = "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED"


class GpuMemory:
    """Bytes of one GPU, mapped here for as long as an object that uses them. Not zeroed.

    Raises:
        DriverError: the GPU does not offer this.
    """

    def __init__(self, index: int, nbytes: int, handle: Any, resources: Resources) -> None:
        """Use `allocate` or `open`."""
        self.index = index
        self.nbytes = nbytes
        self._resources = resources
        # Another GPU than the one that opens it, maybe.
        owner = call("cuMemGetAllocationPropertiesFromHandle", handle).location.id
        self._device = torch.device("cuda", int(owner))
        size = _rounded(index, nbytes)
        self.address: int = _map(index, handle, size)
        weakref.finalize(self, _unmap, index, self.address, size)

    @classmethod
    def allocate(cls, index: int, nbytes: int) -> Self:
        """Return new memory that other processes can be let into.

        Raises:
            ConfigError: the GPU has not that much left.
        """
        with current(index):
            handle = _create(index, nbytes)
            try:
                descriptor = int(call("cuMemExportToShareableHandle", handle, _descriptor_type(), 0))
                os.set_inheritable(descriptor, False)  # a program that we start must not keep the memory
                return cls(index, nbytes, handle, Resources(descriptor))
            finally:
                call("cuMemRelease", handle)  # what is mapped stays

    @classmethod
    def open(cls, index: int, descriptor: int, nbytes: int) -> Self:
        """Map what another process has allocated, for this GPU. The descriptor stays the caller's."""
        with current(index):
            handle = call("cuMemImportFromShareableHandle", descriptor, _descriptor_type())
            try:
                return cls(index, nbytes, handle, Resources())
            finally:
                call("cuMemRelease", handle)

    @property
    def descriptor(self) -> int | None:
        """Of memory that was allocated here: open as long as this object lives."""
        return self._resources.descriptor

    @property
    def addresses(self) -> memoryview:
        """To be sliced and compared, never read: the host would crash. Keeps the memory."""
        return addresses_at(self.address, self.nbytes, keep=self)

    def tensor(self, offset: int = 0, nbytes: int | None = None) -> torch.Tensor:
        """Return a part as bytes. The tensor keeps the memory."""
        nbytes = self.nbytes - offset if nbytes is None else nbytes
        return tensor_at(self.address + offset, nbytes, self._device, keep=self)


def tensor_at(address: int, nbytes: int, device: torch.device, *, keep: object) -> torch.Tensor:
    """Return bytes that kernels of the GPU reach, its own or page-locked ones of the host, as a tensor of it.

    The tensor keeps `keep`, whose memory it is.
    """
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device=device)
    tensor: torch.Tensor = torch.as_tensor(_Bytes(address, nbytes, keep), device=device)
    if tensor.data_ptr() != address:
        raise DriverError(f"torch takes memory of {device} for another device's, and copied it")
    return tensor


def addresses_at(address: int, nbytes: int, *, keep: object) -> memoryview:
    """Return memory of a GPU to be sliced and compared; see `GpuMemory.addresses`. Keeps `keep`."""
    array = (ctypes.c_char * nbytes).from_address(address)
    array.memory = keep  # type: ignore[attr-defined]  # an attribute of ours: what keeps the memory
    return memoryview(array).cast("B")


class _Bytes:
    """What torch asks of memory that is not its own."""

    def __init__(self, address: int, nbytes: int, keep: object) -> None:
        self._keep = keep
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 2
        }  # fmt: skip


@functools.cache
def why_not_shared(index: int) -> str | None:
    """Say why this GPU's memory cannot be shared between processes; None if it can. Found by doing it."""
    reason = why_missing()
    if reason is not None:
        return reason
    try:
        own = GpuMemory.allocate(index, _PROBE_NBYTES)
        assert own.descriptor is not None
        opened = GpuMemory.open(index, own.descriptor, _PROBE_NBYTES)
        with torch.cuda.device(index), torch.cuda.stream(torch.cuda.Stream(index)):  # type: ignore[no-untyped-call]  # torch has no hints here
            own.tensor().fill_(_PROBE)
            seen = torch.zeros(_PROBE_NBYTES, dtype=torch.uint8, pin_memory=True)
            seen.copy_(opened.tensor(), non_blocking=True)
            read = torch.cuda.Event()  # type: ignore[no-untyped-call]  # as above
            read.record()
            read.synchronize()
        if not bool((seen == _PROBE).all()):
            return f"cuda:{index}: memory that was opened by its descriptor is not the same memory"
    except (ConfigError, RuntimeError) as exc:  # the driver's or torch's: no such memory here, or no numpy
        return f"cuda:{index}: its memory cannot be shared between processes: {exc}"
    return None


@functools.cache
def _properties(index: int) -> Any:  # the bindings have no hints
    properties = struct("CUmemAllocationProp")
    properties.type = constant("CUmemAllocationType", "CU_MEM_ALLOCATION_TYPE_PINNED")
    properties.location.type = constant("CUmemLocationType", "CU_MEM_LOCATION_TYPE_DEVICE")
    properties.location.id = index
    properties.requestedHandleTypes = _descriptor_type()
    if attribute(index, _WRITTEN_BY_CARDS):  # else UCX could not register a ring that lies there
        properties.allocFlags.gpuDirectRDMACapable = 1
    return properties


def _descriptor_type() -> Any:  # as above
    return constant("CUmemAllocationHandleType", "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR")


@functools.cache
def _granularity(index: int) -> int:
    kind = constant("CUmemAllocationGranularity_flags", "CU_MEM_ALLOC_GRANULARITY_MINIMUM")
    return int(call("cuMemGetAllocationGranularity", _properties(index), kind))


def _create(index: int, nbytes: int) -> Any:  # as above
    size = _rounded(index, nbytes)
    with suppress(DriverError):
        return call("cuMemCreate", size, _properties(index), 0)
    torch.cuda.empty_cache()  # what torch keeps for later
    try:
        return call("cuMemCreate", size, _properties(index), 0)
    except DriverError as exc:
        raise no_room(index, size, str(exc)) from exc


def no_room(index: int, nbytes: int, reason: str) -> ConfigError:
    return ConfigError(
        f"cuda:{index} has no {nbytes} bytes left: {reason}; set a smaller num_slots or slot_nbytes, or "
        "leave more of its memory free"
    )


def _rounded(index: int, nbytes: int) -> int:
    return -(-nbytes // _granularity(index)) * _granularity(index)


def _map(index: int, handle: Any, size: int) -> int:
    """Map for reading and writing by one GPU; in its context."""
    address = _RANGES.take(size)
    try:
        call("cuMemMap", address, size, 0, handle, 0)
    except DriverError:
        _RANGES.give_back(size, address)
        raise
    try:
        access = struct("CUmemAccessDesc")
        access.location.type = constant("CUmemLocationType", "CU_MEM_LOCATION_TYPE_DEVICE")
        access.location.id = index
        access.flags = constant("CUmemAccess_flags", "CU_MEM_ACCESS_FLAGS_PROT_READWRITE")
        call("cuMemSetAccess", address, size, [access], 1)
    except DriverError:
        _unmap(index, address, size)
        raise
    return address


def _unmap(index: int, address: int, size: int) -> None:
    """Also at the end of the process, when the driver may have ended already."""
    with suppress(DriverError), current(index):
        call("cuMemUnmap", address, size)
        _RANGES.give_back(size, address)


class _Ranges:
    """Ranges of addresses that nothing is mapped at. They are used again, never given back to the driver:
    on an H200 with driver 580, torch's cudaMalloc failed with cudaErrorAlreadyMapped some time after
    they had been."""

    def __init__(self) -> None:
        self._free: dict[int, deque[int]] = {}

    def take(self, size: int) -> int:
        try:
            return self._free[size].pop()
        except (KeyError, IndexError):
            return int(call("cuMemAddressReserve", size, 0, 0, 0))

    def give_back(self, size: int, address: int) -> None:
        """Waits for no lock: whoever holds one may be the thread that collects garbage now."""
        self._free.setdefault(size, deque()).append(address)


_RANGES: Final = _Ranges()
