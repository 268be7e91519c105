"""The schedule pass: packs each receiver's transfers into groups that fit a slot, in sending order."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from wbridge.config import Config, Staging
from wbridge.errors import PlanError
from wbridge.ids import WorkerId
from wbridge.layout.dtype import itemsize
from wbridge.layout.region import Strided
from wbridge.plan.balance import Shipment
from wbridge.plan.geometry import Chunk, Geometry
from wbridge.plan.types import Group, Piece, Transfer

ALIGNMENT = 8
"""Pieces start at multiples of this many bytes, the size of the largest element."""

CHUNKS_PER_SLOT = 4
"""Transfers are split to at most this part of a slot, so a closed group leaves little of it empty."""

DIRECT_SLOTS = 4
"""Slots of a direct ring unless the configuration says otherwise."""


class _Item(msgspec.Struct, frozen=True, gc=False):
    """One transfer before it has a place."""

    shipment: Shipment
    chunk: Chunk
    writer: WorkerId
    tensor: str
    element_nbytes: int
    nbytes: int


def schedule(
    shipments: Sequence[Shipment],
    config: Config,
    geometry: Geometry,
    *,
    atomic: Mapping[WorkerId, Sequence[Sequence[str]]],
) -> tuple[Group, ...]:
    """Return the groups of every receiver, numbered in the order in which they are filled.

    All writers of a receiver progress at the same relative pace, so none waits for another's turn.
    Tensors of one `atomic` set stay in one group when a slot can hold them.

    Raises:
        PlanError: a slot is too small for one element.
    """
    capacity = config.slot_nbytes // ALIGNMENT * ALIGNMENT
    if capacity == 0:
        raise PlanError(f"slot_nbytes = {config.slot_nbytes}: raise it to at least {ALIGNMENT} bytes")
    groups: list[Group] = []
    for receiver, own in itertools.groupby(shipments, key=lambda s: s.portion.need.receiver):
        items = [item for shipment in own for item in _items(shipment, capacity, geometry)]
        for index, filled in enumerate(_pack(_units(items, atomic.get(receiver, ())), capacity)):
            groups.append(_group(receiver, index, filled))
    return tuple(groups)


def ring_slots(config: Config, num_groups: int, receiver_staging: Staging) -> int:
    """Return how many slots a receiver's ring has: a whole version when pinned, few when direct, and never
    more than a version takes."""
    automatic = num_groups if receiver_staging == "pinned" else DIRECT_SLOTS
    return min(config.num_slots or automatic, num_groups)


def _items(shipment: Shipment, capacity: int, geometry: Geometry) -> Iterator[_Item]:
    portion, source = shipment.portion, shipment.source
    element_nbytes = itemsize(portion.wire_dtype)
    max_elements = max(1, capacity // CHUNKS_PER_SLOT // element_nbytes)
    for chunk in geometry.chunks(source.region, shipment.region, max_elements):
        yield _Item(
            shipment=shipment,
            chunk=chunk,
            writer=source.holding.worker,
            tensor=portion.need.tensor,
            element_nbytes=element_nbytes,
            nbytes=chunk.num_elements * element_nbytes,
        )


def _units(items: Sequence[_Item], atomic: Sequence[Sequence[str]]) -> Iterator[list[_Item]]:
    """Yield items in sending order; those of one atomic set together, others one by one."""
    totals: dict[WorkerId, int] = {}
    for item in items:
        totals[item.writer] = totals.get(item.writer, 0) + item.nbytes
    unit_of = _merge(atomic)
    done = dict.fromkeys(totals, 0)
    progress: list[float] = []
    unit_progress: dict[str, float] = {}
    for item in items:
        progress.append(done[item.writer] / totals[item.writer])
        done[item.writer] += item.nbytes
        if unit := unit_of.get(item.tensor):
            unit_progress.setdefault(unit, progress[-1])
            unit_progress[unit] = min(unit_progress[unit], progress[-1])

    def key(k: int) -> tuple[float, str, int]:
        unit = unit_of.get(items[k].tensor, "")
        return (unit_progress[unit] if unit else progress[k]), unit, k

    order = sorted(range(len(items)), key=key)
    for unit, run in itertools.groupby(order, key=lambda k: unit_of.get(items[k].tensor, "")):
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


def _pack(units: Iterable[Sequence[_Item]], capacity: int) -> Iterator[dict[WorkerId, list[_Item]]]:
    """Fill slots in order; a unit that does not fit into the rest of a slot opens the next one."""
    filling = _Filling()
    for unit in units:
        if filling.nbytes and len(unit) > 1 and filling.nbytes_with_all(unit) > capacity:
            yield filling.packed
            filling = _Filling()
        for item in unit:
            if filling.nbytes and filling.nbytes_with(item) > capacity:
                yield filling.packed
                filling = _Filling()
            filling.add(item)
    if filling.nbytes:
        yield filling.packed


class _Filling:
    """The group being filled, with the bytes that it takes when each piece is aligned."""

    def __init__(self) -> None:
        self.packed: dict[WorkerId, list[_Item]] = {}
        self.nbytes = 0
        self._sizes: dict[WorkerId, int] = {}

    def add(self, item: _Item) -> None:
        size = self._sizes.get(item.writer)
        if size is None:
            size, self.packed[item.writer] = 0, []
        self.packed[item.writer].append(item)
        self._sizes[item.writer] = size + item.nbytes
        self.nbytes += _aligned(size + item.nbytes) - _aligned(size)

    def nbytes_with(self, item: _Item) -> int:
        size = self._sizes.get(item.writer, 0)
        return self.nbytes + _aligned(size + item.nbytes) - _aligned(size)

    def nbytes_with_all(self, items: Sequence[_Item]) -> int:
        added: dict[WorkerId, int] = {}
        for item in items:
            added[item.writer] = added.get(item.writer, 0) + item.nbytes
        sizes = ((self._sizes.get(writer, 0), nbytes) for writer, nbytes in added.items())
        return self.nbytes + sum(_aligned(size + nbytes) - _aligned(size) for size, nbytes in sizes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _group(receiver: WorkerId, index: int, filled: Mapping[WorkerId, Sequence[_Item]]) -> Group:
    pieces: list[Piece] = []
    end = 0
    for writer in sorted(filled):
        start = end = _aligned(end)
        transfers: list[Transfer] = []
        # Wide elements first: then every transfer of the piece is aligned without padding.
        for item in sorted(filled[writer], key=lambda item: -item.element_nbytes):
            transfers.append(_transfer(item, end))
            end += item.nbytes
        pieces.append(Piece(writer=writer, offset=start, nbytes=end - start, transfers=tuple(transfers)))
    return Group(receiver=receiver, index=index, nbytes=end, pieces=tuple(pieces))


def _transfer(item: _Item, slot_offset: int) -> Transfer:
    portion, holding = item.shipment.portion, item.shipment.source.holding
    need, overlap, wire = portion.need, item.chunk.overlap, item.chunk.wire
    extents, source, target = overlap.extents, overlap.left.strides, overlap.right.strides
    if need.repeats:
        nothing = (0,) * len(need.repeats)
        extents += tuple(extent for extent, _ in need.repeats)
        source += nothing
        target += tuple(stride for _, stride in need.repeats)
        wire = Strided(0, wire.strides + nothing)
    return Transfer(
        tensor=need.tensor,
        extents=extents,
        source_parameter=holding.parameter,
        source=Strided(overlap.left.offset + holding.offset, source),
        target_parameter=need.parameter,
        target=Strided(overlap.right.offset + need.offset, target),
        wire=wire,
        wire_dtype=portion.wire_dtype,
        slot_offset=slot_offset,
    )
