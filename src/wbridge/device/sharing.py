"""Shared parameters: tensors in memory that the other processes of the host can map and write."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Final

import torch

from wbridge.device.base import Buffer
from wbridge.device.cpu import CpuBuffer
from wbridge.device.memory import HostMemory, Mapping
from wbridge.errors import ConfigError

_ALIGNMENT: Final = 4096

# Whoever describes a parameter has only the tensor, so the process keeps where its arenas lie.
_arenas: Final = weakref.WeakSet[Mapping]()


def share_memory(owner: torch.nn.Module | Iterable[torch.Tensor]) -> None:
    """Move parameters and buffers into one piece of memory that other processes of the host can map.

    A receiver whose parameters lie there is written directly, without slots, in the modes with direct
    receivers. Each tensor stays the same object. Views that are not among the tensors keep the old memory,
    so share before anything else takes a parameter's address. The memory lives as long as its last tensor.

    Raises:
        ConfigError: a tensor is not in the memory of the host.
    """
    if isinstance(owner, torch.nn.Module):
        owner = [*owner.parameters(), *owner.buffers()]
    tensors = list(owner)
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise ConfigError(f"a tensor on {tensor.device} cannot be shared; move it to the host first")
        storages.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage())
    storages.pop(0, None)  # of empty tensors
    if not storages:
        return
    offsets, end = {}, 0
    for address, storage in storages.items():
        offsets[address] = end
        end += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
    arena = HostMemory(end, shared=True)
    moved: dict[int, torch.UntypedStorage] = {}
    for address, storage in storages.items():
        view = arena.view[offsets[address] : offsets[address] + storage.nbytes()]
        moved[address] = torch.frombuffer(view, dtype=torch.uint8).untyped_storage()
        moved[address].copy_(storage)
    for tensor in tensors:
        address = tensor.untyped_storage().data_ptr()
        if address in moved:
            _rebind(tensor, moved[address])
    if isinstance(mapping := arena.view.obj, Mapping):  # not of empty tensors alone
        _arenas.add(mapping)


def arena_of(tensors: Iterable[torch.Tensor]) -> Buffer | None:
    """Return the one shared memory in which all `tensors` lie; None if there is no such."""
    tensors = [tensor for tensor in tensors if tensor.numel()]
    for mapping in list(_arenas):
        arena = HostMemory.of(mapping)
        start, nbytes = _address(arena.view), arena.view.nbytes
        if tensors and all(
            start <= tensor.data_ptr() and _end(tensor) <= start + nbytes for tensor in tensors
        ):
            return CpuBuffer(nbytes, "device", memory=arena)
    return None


def offset_in(arena: Buffer, tensor: torch.Tensor) -> int:
    """Return where the first element of `tensor` lies in `arena`, in bytes."""
    return tensor.data_ptr() - _address(arena.view)


def _rebind(tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        moved = torch.empty(0, dtype=tensor.dtype)
        moved.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        tensor.data = moved


def _end(tensor: torch.Tensor) -> int:
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.itemsize


def _address(memory: memoryview) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
