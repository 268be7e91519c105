"""Tables of strided copies: one that torch runs, and one that the native extension runs in a single call.

The table of GPUs is in `kernels`."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final, Protocol

import msgspec
import torch

from wbridge.device.base import Buffer
from wbridge.errors import InternalError, LayoutError
from wbridge.native.extension import table_type

_BITS: Final = {
    1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128
}  # fmt: skip
"""Equal dtypes are copied as bits, so that one kernel serves all and no NaN payload changes."""
_NATIVE_CASTS: Final = {(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)}

_NUM_CHECKED: Final = 16
"""Storages of a table that are looked at before each run. Whoever resizes one, as frameworks do that
free parameters between steps, resizes them all; looking at all would cost more than copying small ones."""


class Row(msgspec.Struct, frozen=True):
    """One strided copy between the storage of `tensor` and a slot; checked by whoever builds it.

    `offset` and `strides` count elements of the tensor from its storage's start. `slot_offset` is in
    bytes from the start of the slot, `slot_strides` count elements of `slot_dtype`.
    """

    tensor: torch.Tensor
    extents: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]
    slot_dtype: torch.dtype
    slot_offset: int
    slot_strides: tuple[int, ...]

    @property
    def is_native(self) -> bool:
        """Whether the native table can run it: on the host, and equal dtypes or a cast that it knows."""
        dtypes = self.tensor.dtype, self.slot_dtype
        return self.tensor.device.type == "cpu" and (dtypes[0] == dtypes[1] or dtypes in _NATIVE_CASTS)


class Table(Protocol):
    """Copies of one direction, compiled once. Holds the tensors' storage. Used by one stream at a time."""

    def __init__(self, rows: Sequence[Row], *, into_slot: bool) -> None: ...

    def run(self, buffer: Buffer, base: int) -> None:
        """Copy now, in the calling thread, to or from `buffer` at byte `base`."""
        ...

    def forget(self, buffer: Buffer) -> None:
        """Drop what is kept for `buffer`."""
        ...


class Residence:
    """Keeps the storages of tensors whose addresses somebody holds, and notices when they move."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._storages = [tensor.untyped_storage() for tensor in tensors]
        step = -(-len(tensors) // _NUM_CHECKED) or 1
        self._checked = self._storages[::step]
        self._expected = [storage.data_ptr() for storage in self._checked]

    def check(self) -> None:
        """Raise LayoutError if a storage is not where it was."""
        if [storage.data_ptr() for storage in self._checked] != self._expected:
            raise LayoutError(
                "a parameter's storage was resized since the worker connected; keep parameters in place"
            )


class NativeTable:
    """One call of the extension for all rows, without the GIL; large tables use its threads too.

    Raises:
        NativeUnavailable: the extension was not built.
    """

    def __init__(self, rows: Sequence[Row], *, into_slot: bool) -> None:
        self._residence = Residence([row.tensor for row in rows])
        numbers = array("q")
        for row in rows:
            itemsize, slot_itemsize = row.tensor.itemsize, row.slot_dtype.itemsize
            address = row.tensor.untyped_storage().data_ptr() + row.offset * itemsize
            numbers.extend((address, row.slot_offset, itemsize, slot_itemsize))
            numbers.append(len(row.extents))
            numbers.extend(row.extents)
            numbers.extend(stride * itemsize for stride in row.strides)
            numbers.extend(stride * slot_itemsize for stride in row.slot_strides)
        self._table = table_type()(numbers, into_slot=into_slot)

    def run(self, buffer: Buffer, base: int) -> None:
        self._residence.check()
        self._table.run(buffer.view, base)

    def forget(self, buffer: Buffer) -> None:
        return


class TorchTable:
    """One torch call for all rows, which dispatches each of them; it runs where no other table can."""

    def __init__(self, rows: Sequence[Row], *, into_slot: bool) -> None:
        self._rows = rows
        self._into_slot = into_slot
        self._parameters = [
            _window(row, row.tensor, _bits(row, row.tensor.dtype), row.offset, row.strides) for row in rows
        ]
        self._slots: dict[tuple[int, int], tuple[Buffer, list[torch.Tensor]]] = {}

    def run(self, buffer: Buffer, base: int) -> None:
        slots = self._slot_views(buffer, base)
        # Weights made in inference mode can be written only there, and all others there too.
        with torch.inference_mode():
            if self._into_slot:
                torch._foreach_copy_(slots, self._parameters, non_blocking=True)
            else:
                torch._foreach_copy_(self._parameters, slots, non_blocking=True)

    def forget(self, buffer: Buffer) -> None:
        self._slots = {key: kept for key, kept in self._slots.items() if kept[0] is not buffer}

    def _slot_views(self, buffer: Buffer, base: int) -> list[torch.Tensor]:
        """Views are kept per slot; the kept buffer makes its identity a safe key."""
        key = (id(buffer), base)
        if key not in self._slots:
            self._slots[key] = (buffer, [_slot_view(row, buffer, base) for row in self._rows])
        return self._slots[key][1]


def _slot_view(row: Row, buffer: Buffer, base: int) -> torch.Tensor:
    memory = buffer.tensor
    if not isinstance(memory, torch.Tensor):
        raise InternalError(f"a buffer of {type(memory).__name__} is no tensor")
    dtype = _bits(row, row.slot_dtype)
    start = int(memory.storage_offset()) + base + row.slot_offset
    return _window(row, memory, dtype, start // dtype.itemsize, row.slot_strides)


def _bits(row: Row, dtype: torch.dtype) -> torch.dtype:
    return _BITS[dtype.itemsize] if row.tensor.dtype == row.slot_dtype else dtype


def _window(
    row: Row, tensor: torch.Tensor, dtype: torch.dtype, offset: int, strides: tuple[int, ...]
) -> torch.Tensor:
    """The row's elements in the storage of `tensor`, whatever its shape: no autograd, no copy."""
    whole = torch.empty(0, dtype=dtype, device=tensor.device).set_(tensor.untyped_storage())
    return whole.as_strided(row.extents, strides, offset)
