"""The schedule pass: packs each receiver's transfers into groups that fit a slot, in sending order."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from wbridge.config import Config, Staging
from wbridge.errors import PlanError
from wbridge.ids import WorkerId
from wbridge.layout.algebra import split
from wbridge.layout.dtype import itemsize
from wbridge.layout.region import Overlap, Strided
from wbridge.plan.balance import Shipment
from wbridge.plan.geometry import Geometry, packed_strides
from wbridge.plan.types import Group, Piece, Transfer

ALIGNMENT = 8
"""Pieces start at multiples of this many bytes, the size of the largest element."""

CHUNKS_PER_SLOT = 4
"""Transfers are split to at most this part of a slot, so a closed group leaves little of it empty."""

DIRECT_SLOTS = 4
"""Slots of a direct ring unless the configuration says otherwise."""


class _Item(msgspec.Struct, frozen=True):
    """One transfer before it has a place."""

    shipment: Shipment
    overlap: Overlap
    element_nbytes: int
    nbytes: int

    @property
    def writer(self) -> WorkerId:
        return self.shipment.source.holding.worker

    @property
    def tensor(self) -> str:
        return self.shipment.portion.need.tensor


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
    strides: dict[tuple[int, ...], tuple[int, ...]] = {}
    for receiver, own in itertools.groupby(shipments, key=lambda s: s.portion.need.receiver):
        items = [item for shipment in own for item in _items(shipment, capacity, geometry)]
        for index, packed in enumerate(_pack(_units(items, atomic.get(receiver, ())), capacity)):
            groups.append(_group(receiver, index, packed, strides))
    return tuple(groups)


def ring_slots(config: Config, num_groups: int, receiver_staging: Staging) -> int:
    """Return how many slots a receiver's ring has: a whole version when pinned, few when direct."""
    if config.num_slots:
        return config.num_slots
    return num_groups if receiver_staging == "pinned" else min(DIRECT_SLOTS, num_groups)


def _items(shipment: Shipment, capacity: int, geometry: Geometry) -> Iterator[_Item]:
    element_nbytes = itemsize(shipment.portion.wire_dtype)
    max_elements = max(1, capacity // CHUNKS_PER_SLOT // element_nbytes)
    for overlap in geometry.overlaps(shipment.source.region, shipment.region):
        fits = overlap.num_wire_elements <= max_elements
        for chunk in (overlap,) if fits else split(overlap, max_elements):
            nbytes = chunk.num_wire_elements * element_nbytes
            yield _Item(shipment=shipment, overlap=chunk, element_nbytes=element_nbytes, nbytes=nbytes)


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
    packed: dict[WorkerId, list[_Item]] = {}
    sizes: dict[WorkerId, int] = {}
    for unit in units:
        if sizes and len(unit) > 1 and _size_with(sizes, unit) > capacity:
            yield packed
            packed, sizes = {}, {}
        for item in unit:
            if sizes and _size_with(sizes, (item,)) > capacity:
                yield packed
                packed, sizes = {}, {}
            packed.setdefault(item.writer, []).append(item)
            sizes[item.writer] = sizes.get(item.writer, 0) + item.nbytes
    if packed:
        yield packed


def _size_with(sizes: Mapping[WorkerId, int], items: Iterable[_Item]) -> int:
    """Return the bytes of a group after `items` joined the pieces of the given sizes."""
    grown = dict(sizes)
    for item in items:
        grown[item.writer] = grown.get(item.writer, 0) + item.nbytes
    return sum(_aligned(nbytes) for nbytes in grown.values())


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _group(
    receiver: WorkerId,
    index: int,
    packed: Mapping[WorkerId, Sequence[_Item]],
    strides: dict[tuple[int, ...], tuple[int, ...]],
) -> Group:
    pieces: list[Piece] = []
    end = 0
    for writer in sorted(packed):
        start = end = _aligned(end)
        transfers: list[Transfer] = []
        # Wide elements first: then every transfer of the piece is aligned without padding.
        for item in sorted(packed[writer], key=lambda item: -item.element_nbytes):
            transfers.append(_transfer(item, end, strides))
            end += item.nbytes
        pieces.append(Piece(writer=writer, offset=start, nbytes=end - start, transfers=tuple(transfers)))
    return Group(receiver=receiver, index=index, nbytes=end, pieces=tuple(pieces))


def _transfer(item: _Item, slot_offset: int, known: dict[tuple[int, ...], tuple[int, ...]]) -> Transfer:
    portion, overlap, holding = item.shipment.portion, item.overlap, item.shipment.source.holding
    need = portion.need
    extents, source, target = overlap.extents, overlap.left, overlap.right
    if (wire := known.get(extents)) is None:
        wire = known[extents] = packed_strides(extents)
    source_strides, target_strides = source.strides, target.strides
    if need.repeats:
        extents += tuple(extent for extent, _ in need.repeats)
        target_strides += tuple(stride for _, stride in need.repeats)
        wire += (0,) * len(need.repeats)
        source_strides += (0,) * len(need.repeats)
    return Transfer(
        tensor=need.tensor,
        extents=extents,
        source_parameter=holding.parameter,
        source=Strided(source.offset + holding.offset, source_strides),
        target_parameter=need.parameter,
        target=Strided(target.offset + need.offset, target_strides),
        wire=Strided(0, wire),
        wire_dtype=portion.wire_dtype,
        slot_offset=slot_offset,
    )
