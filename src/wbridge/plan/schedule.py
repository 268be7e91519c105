"""The schedule pass: packs what a receiver gets into groups that fit a slot, in sending order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from wbridge.config import Config, Staging

ALIGNMENT = 8
"""Pieces start at multiples of this many bytes, the size of the largest element."""

DIRECT_SLOTS = 4
"""Slots of a direct ring unless the configuration says otherwise."""

PASSING_SLOTS = 24
"""The same for a rollout that takes part in an exchange: groups then come by up to three hops, and credits
and notifications of each wait behind the bytes of others. With 12 the trainers' link waited for credits."""


class Inflow(msgspec.Struct, frozen=True):
    """What one receiver gets of a cell for one of its rows."""

    tensors: tuple[str, ...]
    block_nbytes: tuple[int, ...]
    """Of each block of a tensor."""
    element_nbytes: int
    writers: tuple[int, ...]
    """Of each block of each tensor, in order: the index of the worker that sends it."""

    @property
    def nbytes(self) -> int:
        return len(self.tensors) * sum(self.block_nbytes)


class Item(msgspec.Struct, frozen=True, gc=False):
    """One block of one tensor: which inflow, tensor and block, by index."""

    inflow: int
    tensor: int
    block: int
    writer: int
    nbytes: int


class PackedPiece(NamedTuple):
    """What one writer puts into a group, wide elements first: then nothing in a piece needs padding."""

    writer: int
    offset: int
    nbytes: int
    items: list[Item]


class PackedGroup(NamedTuple):
    """A group before its transfers are written out; pieces in the order of their writers."""

    nbytes: int
    pieces: list[PackedPiece]


def schedule(
    inflows: Sequence[Inflow], indivisible: Sequence[Sequence[str]], slot_nbytes: int
) -> tuple[PackedGroup, ...]:
    """Return a receiver's groups in the order in which they are filled.

    All writers progress at the same relative pace, so none waits for another's turn. Tensors of one
    `indivisible` set stay in one group when a slot can hold them.
    """
    capacity = slot_nbytes // ALIGNMENT * ALIGNMENT
    items = _ordered(inflows)
    unit_of = _merge(indivisible)
    runs = _runs(inflows, items, unit_of) if unit_of else ([item] for item in items)
    widths = [inflow.element_nbytes for inflow in inflows]
    return tuple(_packed(filled, widths) for filled in _pack(runs, capacity))


def ring_slots(config: Config, num_groups: int, receiver_staging: Staging, *, passes_on: bool = False) -> int:
    """Return how many slots a receiver's ring has: a whole version when pinned, few when direct, and never
    more than a version takes. More if it `passes_on` what it gets, since slots are kept until then."""
    few = PASSING_SLOTS if passes_on else DIRECT_SLOTS
    automatic = num_groups if receiver_staging == "pinned" else few
    return min(config.num_slots or automatic, num_groups)


def _ordered(inflows: Sequence[Inflow]) -> list[Item]:
    """Return all items so that every inflow is finished to the same part at any time."""
    keyed: list[tuple[float, int, int]] = []
    for number, inflow in enumerate(inflows):
        num_units = len(inflow.writers)
        keyed += [((unit + 0.5) / num_units, number, unit) for unit in range(num_units)]
    keyed.sort()
    items: list[Item] = []
    for _, number, unit in keyed:
        inflow = inflows[number]
        tensor, block = divmod(unit, len(inflow.block_nbytes))
        items.append(Item(number, tensor, block, inflow.writers[unit], inflow.block_nbytes[block]))
    return items


def _runs(inflows: Sequence[Inflow], items: Sequence[Item], unit_of: dict[str, str]) -> Iterator[list[Item]]:
    """Yield items in order; those of one set together, where its first one is, the others one by one."""
    units = [unit_of.get(inflows[item.inflow].tensors[item.tensor], "") for item in items]
    first: dict[str, int] = {}
    for place, unit in enumerate(units):
        first.setdefault(unit, place)
    order = sorted(range(len(items)), key=lambda k: (first[units[k]] if units[k] else k, units[k], k))
    for unit, run in itertools.groupby(order, key=lambda k: units[k]):
        if unit:
            yield [items[k] for k in run]
        else:
            yield from ([items[k]] for k in run)


def _merge(atomic: Sequence[Sequence[str]]) -> dict[str, str]:
    """Return for each tensor of a set the first name of its set; sets that share a tensor are one."""
    members: dict[str, set[str]] = {}
    for tensors in atomic:
        merged = set(tensors).union(*(members.get(tensor, ()) for tensor in tensors))
        members.update(dict.fromkeys(merged, merged))
    names: dict[int, str] = {}
    return {tensor: names.setdefault(id(own), min(own)) for tensor, own in members.items()}


class _Filling:
    """The group being filled, with the bytes that it takes when each piece is aligned."""

    def __init__(self) -> None:
        self.by_writer: dict[int, list[Item]] = {}
        self.nbytes = 0
        self._sizes: dict[int, int] = {}

    def add(self, item: Item) -> None:
        size = self._sizes.get(item.writer)
        if size is None:
            size, self.by_writer[item.writer] = 0, []
        self.by_writer[item.writer].append(item)
        self._sizes[item.writer] = total = size + item.nbytes
        self.nbytes += -(-total // ALIGNMENT) * ALIGNMENT - -(-size // ALIGNMENT) * ALIGNMENT

    def nbytes_with(self, items: Sequence[Item]) -> int:
        added: dict[int, int] = {}
        for item in items:
            added[item.writer] = added.get(item.writer, 0) + item.nbytes
        sizes = ((self._sizes.get(writer, 0), nbytes) for writer, nbytes in added.items())
        return self.nbytes + sum(_aligned(size + nbytes) - _aligned(size) for size, nbytes in sizes)


def _pack(runs: Iterator[list[Item]], capacity: int) -> Iterator[_Filling]:
    """Fill slots in order; a run that does not fit into the rest of a slot opens the next one."""
    filling = _Filling()
    for run in runs:
        if len(run) > 1 and filling.nbytes and filling.nbytes_with(run) > capacity:
            yield filling
            filling = _Filling()
        for item in run:
            near_full = filling.nbytes + item.nbytes + ALIGNMENT > capacity
            if near_full and filling.nbytes and filling.nbytes_with([item]) > capacity:
                yield filling
                filling = _Filling()
            filling.add(item)
    if filling.nbytes:
        yield filling


def _packed(filled: _Filling, widths: Sequence[int]) -> PackedGroup:
    pieces: list[PackedPiece] = []
    end = 0
    for writer in sorted(filled.by_writer):
        items = sorted(filled.by_writer[writer], key=lambda item: -widths[item.inflow])
        start = _aligned(end)
        end = start + sum(item.nbytes for item in items)
        pieces.append(PackedPiece(writer, start, end - start, items))
    return PackedGroup(end, pieces)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
