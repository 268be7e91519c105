"""Strided copies between parameters and slots, compiled once and run for every version."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeAlias

import msgspec
import torch

from wbridge.device.base import Buffer, Event, Stream
from wbridge.errors import InternalError, LayoutError

_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Equal dtypes are copied as bits, so that one kernel serves all and no NaN payload changes."""

Tensors: TypeAlias = Mapping[str, torch.Tensor]
"""Live local tensors by parameter name."""


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

    def __init__(self, ends: Sequence[_Ends], *, into_slot: bool) -> None:
        self._ends = ends
        self._into_slot = into_slot
        self._parameters = [end.parameter for end in ends]
        self._slots: dict[tuple[int, int], tuple[Buffer, list[torch.Tensor]]] = {}

    def run(self, buffer: Buffer, base: int) -> None:
        """Copy now, in the calling thread, to or from `buffer` at byte `base`."""
        slots = self._slot_views(buffer, base)
        if not slots:
            return
        # Weights made in inference mode can be written only there, and all others there too.
        with torch.inference_mode():
            if self._into_slot:
                torch._foreach_copy_(slots, self._parameters, non_blocking=True)
            else:
                torch._foreach_copy_(self._parameters, slots, non_blocking=True)

    def forget(self, buffer: Buffer) -> None:
        """Drop what was compiled for `buffer`, which will not be used again."""
        self._slots = {key: kept for key, kept in self._slots.items() if kept[0] is not buffer}

    def _slot_views(self, buffer: Buffer, base: int) -> list[torch.Tensor]:
        """Views are kept per slot; the kept buffer makes its identity a safe key."""
        key = (id(buffer), base)
        if key not in self._slots:
            memory = buffer.tensor
            if not isinstance(memory, torch.Tensor):
                raise InternalError(f"a buffer of {type(memory).__name__} is no tensor")
            self._slots[key] = (buffer, [end.slot_view(memory, base) for end in self._ends])
        return self._slots[key][1]


def build_gather(blocks: Iterable[Block], tensors: Tensors) -> CopyPlan:
    """Compile the copies from `tensors` into a slot. Replicated loops are read once.

    Raises:
        LayoutError: a block does not fit its parameter or its slot; the message names the parameter.
    """
    return CopyPlan([_Ends(_without_replication(b), _tensor(b, tensors)) for b in blocks], into_slot=True)


def build_scatter(blocks: Iterable[Block], tensors: Tensors) -> CopyPlan:
    """Compile the copies from a slot into `tensors`. Replicated loops are expanded.

    Raises:
        LayoutError: a block does not fit its parameter or its slot; the message names the parameter.
    """
    return CopyPlan([_Ends(b, _tensor(b, tensors)) for b in blocks], into_slot=False)


def gather(stream: Stream, copies: CopyPlan, buffer: Buffer, base: int = 0) -> Event:
    """Copy into `buffer` at byte `base`, in `stream`; the event is done when the bytes are there."""
    return _submit(stream, copies, buffer, base)


def scatter(stream: Stream, copies: CopyPlan, buffer: Buffer, base: int = 0) -> Event:
    """Copy out of `buffer` at byte `base`, in `stream`; the buffer may be reused when the event is done."""
    return _submit(stream, copies, buffer, base)


def _submit(stream: Stream, copies: CopyPlan, buffer: Buffer, base: int) -> Event:
    stream.submit(lambda: copies.run(buffer, base))
    return stream.record()


class _Ends:
    """Both ends of one block; where their dtypes agree, as bits."""

    def __init__(self, block: Block, tensor: torch.Tensor) -> None:
        self._block = block
        wire = getattr(torch, block.dtype)
        self._slot_dtype = _BITS[wire.itemsize] if tensor.dtype == wire else wire
        last = last_element(block.extents, block.parameter_strides) + block.parameter_offset
        if block.parameter_offset < 0 or last > last_element(tensor.shape, tensor.stride()):
            raise LayoutError(
                f"{block.parameter}: elements {block.parameter_offset} to {last} leave its shape "
                f"{tuple(tensor.shape)}; describe the parameter again"
            )
        self.parameter = self._window(
            tensor,
            dtype=_BITS[wire.itemsize] if tensor.dtype == wire else tensor.dtype,
            offset=int(tensor.storage_offset()) + block.parameter_offset,
            strides=block.parameter_strides,
        )

    def slot_view(self, memory: torch.Tensor, base: int) -> torch.Tensor:
        block, itemsize = self._block, self._slot_dtype.itemsize
        start = int(memory.storage_offset()) + base + block.slot_offset
        if start % itemsize:
            raise LayoutError(
                f"{block.parameter}: slot byte {start} is no place for {itemsize}-byte elements"
            )
        stop = base + block.slot_offset + (last_element(block.extents, block.slot_strides) + 1) * itemsize
        if stop > memory.numel():
            raise LayoutError(
                f"{block.parameter}: byte {stop} lies beyond its slot of {memory.numel()} bytes"
            )
        return self._window(
            memory, dtype=self._slot_dtype, offset=start // itemsize, strides=block.slot_strides
        )

    def _window(
        self, tensor: torch.Tensor, *, dtype: torch.dtype, offset: int, strides: tuple[int, ...]
    ) -> torch.Tensor:
        """The block's elements in the storage of `tensor`, whatever its shape: no autograd, no copy."""
        whole = torch.empty(0, dtype=dtype, device=tensor.device).set_(tensor.untyped_storage())
        try:
            return whole.as_strided(self._block.extents, strides, offset)
        except RuntimeError as exc:
            raise LayoutError(
                f"{self._block.parameter}: extents {self._block.extents}, strides {strides} at {offset} "
                "do not fit its storage; describe the parameter again"
            ) from exc


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
