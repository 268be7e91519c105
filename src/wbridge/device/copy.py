"""Strided copies between parameters and slots, compiled once and run for every version."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeAlias

import msgspec
import torch

from wbridge.device.base import Buffer, Event, Stream
from wbridge.device.cpu import CpuStream, DoneEvent
from wbridge.device.kernels.descriptors import can_copy
from wbridge.device.kernels.program import why_missing as kernel_missing
from wbridge.device.kernels.table import KernelTable
from wbridge.device.tables import NativeTable, Row, Table, TorchTable
from wbridge.errors import LayoutError
from wbridge.layout.dtype import itemsize
from wbridge.native.extension import why_missing as native_missing

Tensors: TypeAlias = Mapping[str, torch.Tensor]
"""Live local tensors by parameter name."""

INLINE_NBYTES: Final = 64 * 2**10
"""Copies up to this size take less time than it takes to wake the thread of a stream."""


class Block(msgspec.Struct, frozen=True):
    """Elements of one parameter and where they lie in a slot, loop by loop.

    `parameter_offset` and `parameter_strides` count elements of the parameter from its `data_ptr`.
    `slot_offset` is in bytes from the start of the slot, `slot_strides` count elements of `dtype`,
    the slot's; a loop with slot stride 0 replicates one slot element over the parameter.
    """

    parameter: str
    extents: tuple[int, ...]
    parameter_offset: int
    parameter_strides: tuple[int, ...]
    dtype: str
    slot_offset: int
    slot_strides: tuple[int, ...]


class CopyPlan:
    """Copies of one direction between live tensors and a slot layout.

    Built by `build_gather` and `build_scatter`. Holds the tensors' storage. Used by one stream at a time.
    """

    def __init__(self, blocks: Sequence[Block], tensors: Tensors, *, into_slot: bool) -> None:
        self._blocks = blocks
        self._fits: set[tuple[int, int]] = set()
        self._is_small = sum(math.prod(b.extents) * itemsize(b.dtype) for b in blocks) <= INLINE_NBYTES
        rows = [_row(block, _tensor(block, tensors)) for block in blocks]
        together: dict[tuple[type[Table], torch.device], list[Row]] = {}
        for row in rows:
            together.setdefault((_table_type(row), row.tensor.device), []).append(row)
        self._tables = [table(rows, into_slot=into_slot) for (table, _), rows in together.items()]

    def start(self, stream: Stream, buffer: Buffer, base: int) -> Event:
        """Copy in `stream`; a small one that nothing waits before runs at once, in the calling thread."""
        if self._is_small and isinstance(stream, CpuStream) and stream.is_idle:
            self.run(buffer, base)
            return DoneEvent()
        stream.submit(lambda: self.run(buffer, base))
        return stream.record()

    def run(self, buffer: Buffer, base: int) -> None:
        """Copy now, in the calling thread, to or from `buffer` at byte `base`.

        Raises:
            LayoutError: a block does not fit there; the message names the parameter. Nothing was copied.
        """
        place = (base, buffer.nbytes)
        if place not in self._fits:  # once per slot, not once per version
            for block in self._blocks:
                _check_slot(block, base, buffer.nbytes)
            self._fits.add(place)
        for table in self._tables:
            table.run(buffer, base)

    def forget(self, buffer: Buffer) -> None:
        """Drop what was compiled for `buffer`, which will not be used again."""
        for table in self._tables:
            table.forget(buffer)


def build_gather(blocks: Iterable[Block], tensors: Tensors) -> CopyPlan:
    """Compile the copies from `tensors` into a slot. Replicated loops are read once.

    Raises:
        LayoutError: a block does not fit its parameter or its slot; the message names the parameter.
    """
    return CopyPlan([_without_replication(block) for block in blocks], tensors, into_slot=True)


def build_scatter(blocks: Iterable[Block], tensors: Tensors) -> CopyPlan:
    """Compile the copies from a slot into `tensors`. Replicated loops are expanded.

    Raises:
        LayoutError: a block does not fit its parameter or its slot; the message names the parameter.
    """
    return CopyPlan(list(blocks), tensors, into_slot=False)


def gather(stream: Stream, copies: CopyPlan, buffer: Buffer, base: int = 0) -> Event:
    """Copy into `buffer` at byte `base`, in `stream`; the event is done when the bytes are there."""
    return copies.start(stream, buffer, base)


def scatter(stream: Stream, copies: CopyPlan, buffer: Buffer, base: int = 0) -> Event:
    """Copy out of `buffer` at byte `base`, in `stream`; the buffer may be reused when the event is done."""
    return copies.start(stream, buffer, base)


def _table_type(row: Row) -> type[Table]:
    if row.is_native and native_missing() is None:
        return NativeTable
    if row.tensor.is_cuda and can_copy(row) and kernel_missing(row.tensor.device.index) is None:
        return KernelTable
    return TorchTable


def _row(block: Block, tensor: torch.Tensor) -> Row:
    last = last_element(block.extents, block.parameter_strides) + block.parameter_offset
    is_backward = any(stride < 0 for stride in (*block.parameter_strides, *block.slot_strides))
    if block.parameter_offset < 0 or is_backward or last > last_element(tensor.shape, tensor.stride()):
        raise LayoutError(
            f"{block.parameter}: elements {block.parameter_offset} to {last} leave its shape "
            f"{tuple(tensor.shape)}; describe the parameter again"
        )
    return Row(
        tensor=tensor,
        extents=block.extents,
        offset=int(tensor.storage_offset()) + block.parameter_offset,
        strides=block.parameter_strides,
        slot_dtype=getattr(torch, block.dtype),
        slot_offset=block.slot_offset,
        slot_strides=block.slot_strides,
    )


def _check_slot(block: Block, base: int, nbytes: int) -> None:
    itemsize = getattr(torch, block.dtype).itemsize
    start = base + block.slot_offset
    if start % itemsize:
        raise LayoutError(f"{block.parameter}: slot byte {start} is no place for {itemsize}-byte elements")
    stop = start + (last_element(block.extents, block.slot_strides) + 1) * itemsize
    if start < 0 or stop > nbytes:
        raise LayoutError(f"{block.parameter}: byte {stop} lies beyond its slot of {nbytes} bytes")


def dtype_of(tensor: torch.Tensor) -> str:
    """Return the name of its dtype, without `torch.`."""
    return str(tensor.dtype).removeprefix("torch.")


def last_element(extents: Sequence[int], strides: Sequence[int]) -> int:
    """Return the offset of the last element of a non-empty strided block, from its first."""
    return sum((n - 1) * s for n, s in zip(extents, strides, strict=True))


def _without_replication(block: Block) -> Block:
    """The sender's side: one element of every loop that the slot does not have."""
    kept = [k for k, stride in enumerate(block.slot_strides) if stride]
    return msgspec.structs.replace(
        block,
        extents=tuple(block.extents[k] for k in kept),
        parameter_strides=tuple(block.parameter_strides[k] for k in kept),
        slot_strides=tuple(block.slot_strides[k] for k in kept),
    )


def _tensor(block: Block, tensors: Tensors) -> torch.Tensor:
    try:
        return tensors[block.parameter]
    except KeyError:
        raise LayoutError(f"the plan names {block.parameter!r}, which this worker does not hold") from None
