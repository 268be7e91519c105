"""The descriptor table of `strided.cu`: what each copy is made of, and how the copies are cut into tiles."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec
import torch

from wbridge.device.tables import Row

_COPY: Final = struct.Struct("<QqIIIIIIxxxxxxxx")
_LOOP: Final = struct.Struct("<qqIIIxxxx")

_MAX_WIDTH: Final = 16
"""Bytes of the widest item. Slots are aligned to it."""
_MAX_ITEMS: Final = 2**31 - 2**17
"""Of one copy: the kernel divides numbers below 2^31, and looks a little past the last item."""
_SQUARES: Final = {1: (64, 64), 2: (32, 64), 4: (32, 32), 8: (16, 32), 16: (16, 16)}
"""By item size: elements of a square along the loops that are contiguous in `to` and in `from`."""
_MIN_SIDE: Final = 16
"""A shorter side leaves most of a square empty."""
_CAST_ITEMS: Final = 4
"""Elements in an item of a cast, where they are aligned."""

_TILE_NBYTES: Final = 4 * 1024
"""Two turns of a warp. Larger ones were slower on an H200: warps ended far apart."""
_MIN_ITEM_COST: Final = 4
"""A lane's item costs as much as this many bytes at least."""

_FIRST_MOVE: Final = 0
_FIRST_TRANSPOSE: Final = 5
_CASTS: Final = {
    (torch.float32, torch.bfloat16): 10,
    (torch.bfloat16, torch.float32): 12,
    (torch.float32, torch.float16): 14,
    (torch.float16, torch.float32): 16,
    (torch.bfloat16, torch.float16): 18,
    (torch.float16, torch.bfloat16): 20,
}
"""The kinds that `strided.cu` numbers; one more where an item has `_CAST_ITEMS` elements."""


class Descriptors(msgspec.Struct, frozen=True):
    """One table in the host's memory: items, loops and the item of each tile, one after the other."""

    memory: torch.Tensor
    loops_offset: int
    tiles_offset: int
    num_tiles: int


class Loop(NamedTuple):
    """Steps in bytes, but for those of a digest in the checkpoint."""

    extent: int
    to: int
    from_: int


class _Copy(NamedTuple):
    """`loops` begin with the innermost; `cost` is an item's, in bytes."""

    kind: int
    parameter: int
    slot: int
    num_items: int
    cost: int
    loops: tuple[Loop, ...]


def can_copy(row: Row) -> bool:
    """Whether the kernel knows the row's dtypes, in both directions."""
    pair = row.tensor.dtype, row.slot_dtype
    return pair[0] == pair[1] or pair in _CASTS


def build_descriptors(rows: Sequence[Row], *, into_slot: bool) -> Descriptors:
    """Describe rows that the kernel can copy."""
    copies = [copy for row in rows for copy in _iter_copies(row, into_slot=into_slot)]
    packed, loops, num_loops, num_tiles = bytearray(), bytearray(), 0, 0
    tiles_of: list[int] = []
    for copy in copies:
        per_tile = max(_TILE_NBYTES // copy.cost, 1)
        packed += _COPY.pack(
            copy.parameter,
            copy.slot,
            num_tiles,
            per_tile,
            copy.num_items,
            num_loops,
            len(copy.loops),
            copy.kind,
        )
        loops += b"".join(map(pack_loop, copy.loops))
        num_loops += len(copy.loops)
        tiles_of.append(-(-copy.num_items // per_tile))
        num_tiles += tiles_of[-1]
    return join(packed, loops, tiles_of)


def join(items: bytearray, loops: bytearray, tiles_of: Sequence[int]) -> Descriptors:
    """One table of items, which have so many tiles each, and of their loops."""
    tiles = torch.repeat_interleave(torch.tensor(tiles_of, dtype=torch.int32))
    tables = (
        torch.frombuffer(items + loops, dtype=torch.uint8) if tiles_of else torch.empty(0, dtype=torch.uint8)
    )
    return Descriptors(
        memory=torch.cat((tables, tiles.to(torch.int32).view(torch.uint8))),
        loops_offset=len(items),
        tiles_offset=len(items) + len(loops),
        num_tiles=sum(tiles_of),
    )


def pack_loop(loop: Loop) -> bytes:
    shift = (loop.extent - 1).bit_length()
    magic = ((1 << 32) * ((1 << shift) - loop.extent)) // loop.extent + 1
    return _LOOP.pack(loop.to, loop.from_, loop.extent, magic, shift)


def _iter_copies(row: Row, *, into_slot: bool) -> Iterator[_Copy]:
    if 0 in row.extents:
        return
    itemsize, slot_itemsize = row.tensor.itemsize, row.slot_dtype.itemsize
    inside = [stride * itemsize for stride in row.strides]
    outside = [stride * slot_itemsize for stride in row.slot_strides]
    to, from_ = (outside, inside) if into_slot else (inside, outside)
    loops = merge(map(Loop, row.extents, to, from_))
    parameter = row.tensor.untyped_storage().data_ptr() + row.offset * itemsize
    if row.tensor.dtype == row.slot_dtype:
        copies = _iter_moves(parameter, row.slot_offset, itemsize, loops)
    else:
        pair = (row.tensor.dtype, row.slot_dtype) if into_slot else (row.slot_dtype, row.tensor.dtype)
        copies = iter([_cast(pair, parameter, row.slot_offset, loops)])
    for copy in copies:
        yield from _iter_parts(copy, into_slot=into_slot)


def merge(loops: Iterable[Loop]) -> list[Loop]:
    """The loops in the order in which the destination is written, contiguous ones made one."""
    merged: list[Loop] = []
    for loop in sorted((loop for loop in loops if loop.extent > 1), key=lambda loop: (loop.to, loop.from_)):
        inner = merged[-1] if merged else None
        if inner and (loop.to, loop.from_) == (inner.extent * inner.to, inner.extent * inner.from_):
            merged[-1] = inner._replace(extent=inner.extent * loop.extent)
        else:
            merged.append(loop)
    return merged


def _iter_moves(parameter: int, slot: int, itemsize: int, loops: list[Loop]) -> Iterator[_Copy]:
    """Equal dtypes, as bits: squares of a transposition, else vectors as wide as everything is aligned."""
    run = itemsize
    if loops and loops[0][1:] == (itemsize, itemsize):
        run, loops = itemsize * loops[0].extent, loops[1:]
    addresses = [parameter, slot, *(stride for loop in loops for stride in loop[1:])]
    if run in _SQUARES and _alignment(run, *addresses) == run:
        along = next((k for k, loop in enumerate(loops) if loop.from_ == run and k > 0), 0)
        if along and loops[0].to == run and min(loops[0].extent, loops[along].extent) >= _MIN_SIDE:
            yield _transpose(parameter, slot, run, [loops[0], loops.pop(along), *loops[1:]])
            return
    if not loops and (slot - parameter) % _MAX_WIDTH == 0:
        yield from _iter_vectors(parameter, slot, run)
        return
    yield _move(parameter, slot, run, loops, _alignment(run, *addresses))


def _iter_vectors(parameter: int, slot: int, run: int) -> Iterator[_Copy]:
    """One run: the widest vectors, and what lies before and after them."""
    head = min(-parameter % _MAX_WIDTH, run)
    body = (run - head) // _MAX_WIDTH * _MAX_WIDTH
    start = 0
    for nbytes in (head, body, run - head - body):
        if nbytes:
            at = parameter + start, slot + start
            yield _move(*at, nbytes, [], _alignment(nbytes, *at))
        start += nbytes


def _move(parameter: int, slot: int, run: int, loops: list[Loop], width: int) -> _Copy:
    whole = (Loop(run // width, width, width), *loops)
    kind = _FIRST_MOVE + width.bit_length() - 1
    return _copy(kind, parameter, slot, max(width, _MIN_ITEM_COST), whole)


def _transpose(parameter: int, slot: int, size: int, loops: list[Loop]) -> _Copy:
    kind = _FIRST_TRANSPOSE + size.bit_length() - 1
    across, along = _SQUARES[size]
    count = -(-loops[0].extent // across) * -(-loops[1].extent // along)
    for loop in loops[2:]:
        count *= loop.extent
    return _Copy(kind, parameter, slot, count, across * along * size, tuple(loops))


def _cast(pair: tuple[torch.dtype, torch.dtype], parameter: int, slot: int, loops: list[Loop]) -> _Copy:
    source, target = (dtype.itemsize for dtype in pair)
    run = 1
    if loops and loops[0][1:] == (target, source):
        run, loops = loops[0].extent, loops[1:]
    # An address counts as the wider side's: a little too strict, and right for either direction.
    units = [(place, max(source, target)) for place in (parameter, slot)]
    units += [unit for loop in loops for unit in ((loop.to, target), (loop.from_, source))]
    is_wide = run % _CAST_ITEMS == 0 and all(at % (_CAST_ITEMS * size) == 0 for at, size in units)
    width = _CAST_ITEMS if is_wide else 1
    whole = (Loop(run // width, width * target, width * source), *loops)
    return _copy(_CASTS[pair] + is_wide, parameter, slot, width * max(source, target), whole)


def _copy(kind: int, parameter: int, slot: int, cost: int, loops: Iterable[Loop]) -> _Copy:
    kept = [loop for loop in loops if loop.extent > 1]
    count = 1
    for loop in kept:
        count *= loop.extent
    return _Copy(kind, parameter, slot, count, cost, tuple(kept or [Loop(1, 0, 0)]))


def _iter_parts(copy: _Copy, *, into_slot: bool) -> Iterator[_Copy]:
    """The copy, or copies of parts of its outermost loop that are not too large to number their items."""
    if copy.num_items <= _MAX_ITEMS:
        yield copy
        return
    *inner, whole = copy.loops
    num_inner = copy.num_items // whole.extent
    step = max(_MAX_ITEMS // num_inner, 1)
    for start in range(0, whole.extent, step):
        extent = min(step, whole.extent - start)
        in_slot, in_parameter = (whole.to, whole.from_) if into_slot else (whole.from_, whole.to)
        loops = (*inner, whole._replace(extent=extent)) if extent > 1 or not inner else tuple(inner)
        part = copy._replace(
            parameter=copy.parameter + start * in_parameter,
            slot=copy.slot + start * in_slot,
            num_items=num_inner * extent,
            loops=loops,
        )
        yield from _iter_parts(part, into_slot=into_slot)


def _alignment(*numbers: int) -> int:
    """The largest power of two, at most the widest item, that divides all numbers."""
    together = _MAX_WIDTH
    for number in numbers:
        together |= number
    return together & -together
