"""The second pass: each class of tensors in cells, whose elements the same workers hold and need."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from wbridge.errors import CoverageError
from wbridge.layout.dtype import itemsize, wire_dtype
from wbridge.layout.region import Region
from wbridge.plan.classes import Members, TensorClass, needed_region
from wbridge.plan.geometry import Geometry, at_origin, region_key
from wbridge.plan.types import Place


class Cell(msgspec.Struct, frozen=True):
    """Elements of every tensor of one class that the same rows hold and need, in one wire dtype."""

    region: Region
    """Its target side means nothing: it says which checkpoint elements these are."""
    wire_dtype: str
    held: tuple[Place, ...]
    """One row for each table."""
    needed: tuple[Place, ...]

    @property
    def nbytes(self) -> int:
        """Of one tensor."""
        return self.region.num_elements * itemsize(self.wire_dtype)


def find_cells(found: TensorClass, members: Members, geometry: Geometry) -> tuple[Cell, ...]:
    """Divide the tensors of a class into cells.

    Raises:
        CoverageError: trainers hold a needed tensor only in part.
    """
    held = _by_region(members, found.held, needed=False)
    by_wire: dict[str, list[Place]] = {}
    for place in found.needed:
        wire = wire_dtype(found.dtype, members.row(place).dtype)
        by_wire.setdefault(wire, []).append(place)
    cells: list[Cell] = []
    holders: dict[tuple[int, ...], tuple[Place, ...]] = {}
    for wire, places in sorted(by_wire.items()):
        needed = _by_region(members, places, needed=True)
        regions = tuple(held), tuple(needed)
        for shared in geometry.shared(*regions):
            if not shared.held:
                raise CoverageError(_partly_held(found, members, geometry, places))
            if shared.held not in holders:
                holders[shared.held] = _one_each([held[regions[0][k]] for k in shared.held])
            cells.append(
                Cell(
                    region=shared.region,
                    wire_dtype=wire,
                    held=holders[shared.held],
                    needed=tuple(sorted(place for k in shared.needed for place in needed[regions[1][k]])),
                )
            )
    return tuple(cells)


def _by_region(members: Members, places: Sequence[Place], *, needed: bool) -> dict[Region, list[Place]]:
    found: dict[Region, list[Place]] = {}
    for place in places:
        row = members.row(place)
        region = at_origin(needed_region(row.region)) if needed else row.region
        found.setdefault(region, []).append(place)
    return {region: found[region] for region in sorted(found, key=region_key)}


def _one_each(groups: Sequence[Sequence[Place]]) -> tuple[Place, ...]:
    """Return one row for each table: aliases inside a worker are dropped."""
    chosen: dict[int, Place] = {}
    for places in groups:
        for place in places:
            chosen.setdefault(place[0], place)
    return tuple(chosen[table] for table in sorted(chosen))


def _partly_held(found: TensorClass, members: Members, geometry: Geometry, places: Sequence[Place]) -> str:
    rollouts, trainers = members.of_table("rollout"), members.of_table("trainer")
    held = tuple(_by_region(members, found.held, needed=False))
    for place in sorted(places, key=lambda place: rollouts[place[0]][0]):
        row = members.row(place)
        region = at_origin(needed_region(row.region))
        missing = [shared.region for shared in geometry.shared(held, (region,)) if not shared.held]
        if not missing:
            continue
        left, index = missing[0].source.offset, []
        for extent in reversed(found.shape):
            left, position = divmod(left, extent)
            index.append(position)
        workers = sorted({members.workers[w] for table, _ in found.held for w in trainers[table]})
        tensor = found.first
        parameter, _ = row.column.places(found.stems[:1], found.layers[:1])[0]
        return (
            f"{members.workers[rollouts[place[0]][0]]}: parameter {parameter!r} needs"
            f" {region.num_elements} elements of {tensor!r} {list(found.shape)} and no trainer holds"
            f" {sum(part.num_elements for part in missing)} of them, such as the one at {index[::-1]};"
            f" {len(workers)} trainers hold parts, the first {workers[0]}."
            " Let the missing trainer connect, or correct the shards it reports"
        )
    raise AssertionError("a cell without holders that no row needs")
