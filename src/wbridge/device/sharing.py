"""Shared parameters: tensors in memory that the other processes of the host can map and write."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Final

import torch

from wbridge.device.base import Buffer
from wbridge.device.cpu import CpuBuffer
from wbridge.device.cuda import CudaBuffer
from wbridge.device.cuda_memory import GpuMemory, why_not_shared
from wbridge.device.memory import HostMemory, Mapping
from wbridge.errors import ConfigError, NativeUnavailable

_ALIGNMENT: Final = 4096

# Whoever describes a parameter has only the tensor, so the process keeps where its arenas lie.
_arenas: Final = weakref.WeakSet["Mapping | GpuMemory"]()


def share_memory(owner: torch.nn.Module | Iterable[torch.Tensor]) -> None:
    """Move parameters and buffers into one piece of memory that other processes of the host can map.

    A receiver whose parameters lie there is written directly, without slots, in the modes with direct
    receivers. Each tensor stays the same object. Views that are not among the tensors keep the old memory,
    and so do captured graphs: share before anything else takes a parameter's address. The memory lives as
    long as its last tensor.

    Raises:
        ConfigError: the tensors are neither all on the host nor all on one GPU.
        NativeUnavailable: the memory of this GPU cannot be shared; says why.
    """
    if isinstance(owner, torch.nn.Module):
        owner = [*owner.parameters(), *owner.buffers()]
    tensors = list(owner)
    device = _common_device(tensors)
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storages.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage())
    storages.pop(0, None)  # of empty tensors
    if not storages:
        return
    offsets, end = {}, 0
    for address, storage in storages.items():
        offsets[address] = end
        end += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
    arena = _allocate(device, end)
    moved: dict[int, torch.UntypedStorage] = {}
    for address, storage in storages.items():
        moved[address] = _part(arena, offsets[address], storage.nbytes()).untyped_storage()
        moved[address].copy_(storage)
    if device.type == "cuda":  # once: the old memory may belong to another stream than the one that reads it
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no hints here
        event.record(torch.cuda.current_stream(device))
        event.synchronize()
    for tensor in tensors:
        address = tensor.untyped_storage().data_ptr()
        if address in moved:
            _rebind(tensor, moved[address])
    _arenas.add(arena)


def arena_of(tensors: Iterable[torch.Tensor]) -> Buffer | None:
    """Return the one shared memory in which all `tensors` lie; None if there is no such."""
    tensors = [tensor for tensor in tensors if tensor.numel()]
    for arena in list(_arenas):
        buffer = _as_buffer(arena)
        start, nbytes = _address(buffer), buffer.nbytes
        if tensors and all(
            start <= tensor.data_ptr() and _end(tensor) <= start + nbytes for tensor in tensors
        ):
            return buffer
    return None


def offset_in(arena: Buffer, tensor: torch.Tensor) -> int:
    """Return where the first element of `tensor` lies in `arena`, in bytes."""
    return tensor.data_ptr() - _address(arena)


def _common_device(tensors: Iterable[torch.Tensor]) -> torch.device:
    devices = {tensor.device for tensor in tensors} or {torch.device("cpu")}
    device, *others = sorted(devices, key=str)
    if others:
        raise ConfigError(
            f"tensors on {device} and {others[0]} cannot share one memory; move them to one device"
        )
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"a tensor on {device} cannot be shared; move it to the host or a GPU first")
    return device


def _allocate(device: torch.device, nbytes: int) -> Mapping | GpuMemory:
    if device.type == "cuda":
        if (reason := why_not_shared(device.index)) is not None:
            raise NativeUnavailable(f"{reason}; leave share_memory() out, and updates pass through slots")
        return GpuMemory.allocate(device.index, nbytes)
    mapping = HostMemory(nbytes, shared=True).view.obj
    assert isinstance(mapping, Mapping)
    return mapping


def _part(arena: Mapping | GpuMemory, offset: int, nbytes: int) -> torch.Tensor:
    if isinstance(arena, GpuMemory):
        return arena.tensor(offset, nbytes)
    return torch.frombuffer(memoryview(arena)[offset : offset + nbytes], dtype=torch.uint8)


def _as_buffer(arena: Mapping | GpuMemory) -> Buffer:
    if isinstance(arena, GpuMemory):
        return CudaBuffer(arena.tensor(), arena, arena.index)
    memory = HostMemory.of(arena)
    return CpuBuffer(memory.view.nbytes, "device", memory=memory)


def _rebind(tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        moved = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        moved.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        tensor.data = moved


def _end(tensor: torch.Tensor) -> int:
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.itemsize


def _address(buffer: Buffer) -> int:
    return torch.frombuffer(buffer.addresses, dtype=torch.uint8).data_ptr()
