"""Mirror: a host copy of some live tensors, laid out so that the same blocks read it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch

from wbridge.device.base import Buffer, Device, Event, Stream
from wbridge.device.copy import Block, Tensors, build_gather, dtype_of, gather, last_element

_ALIGNMENT: Final = 64


class Mirror:
    """One buffer that holds a copy of every named tensor with the tensor's own strides.

    A tensor with holes between its elements costs the holes too. `copy` fills the mirror; whoever
    reads it waits for the event first.
    """

    def __init__(self, device: Device, tensors: Tensors, names: Iterable[str]) -> None:
        blocks: list[Block] = []
        self._nbytes = 0
        for name in sorted(names):
            tensor = tensors[name]
            blocks.append(_whole(name, tensor, self._nbytes))
            span = last_element(tensor.shape, tensor.stride()) + 1 if tensor.numel() else 0
            self._nbytes += -(-span * tensor.itemsize // _ALIGNMENT) * _ALIGNMENT
        self._buffer: Buffer = device.allocate(self._nbytes, "pinned")
        self._copies = build_gather([b for b in blocks if 0 not in b.extents], tensors)
        offsets = {b.parameter: (tensors[b.parameter], b.slot_offset) for b in blocks}
        self.tensors: Tensors = {
            name: _copy_of(*there, self._buffer.tensor) for name, there in offsets.items()
        }
        self._offsets = offsets

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def copy(self, stream: Stream) -> Event:
        """Copy the live tensors as they are when `stream` comes to it."""
        return gather(stream, self._copies, self._buffer)

    def on_device(self) -> Tensors:
        """Return `tensors` for copies that the device does, into memory that the host does not reach."""
        memory = self._buffer.device_tensor
        return {name: _copy_of(*there, memory) for name, there in self._offsets.items()}


def _copy_of(tensor: torch.Tensor, offset: int, memory: object) -> torch.Tensor:
    assert isinstance(memory, torch.Tensor)
    nothing = torch.empty(0, dtype=tensor.dtype, device=memory.device)
    whole = memory[offset:].view(tensor.dtype) if tensor.numel() else nothing
    return whole.as_strided(tensor.shape, tensor.stride())


def _whole(name: str, tensor: torch.Tensor, offset: int) -> Block:
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    return Block(
        parameter=name,
        extents=shape,
        parameter_offset=0,
        parameter_strides=strides,
        dtype=dtype_of(tensor),
        slot_offset=offset,
        slot_strides=strides,
    )
