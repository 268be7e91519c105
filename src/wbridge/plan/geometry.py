"""Geometry: questions about regions, answered once for each class of equal layers, experts and ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import msgspec

from wbridge.layout.algebra import intersect, subtract
from wbridge.layout.region import Overlap, Region, Strided


class Cell(msgspec.Struct, frozen=True):
    """Elements of a wanted region that the same held regions contain; no holders means missing."""

    region: Region
    holders: tuple[int, ...]


class Chunk(msgspec.Struct, frozen=True):
    """A block of elements small enough to travel in one slot, and its dense layout on the wire."""

    overlap: Overlap
    num_elements: int
    wire: Strided


class Geometry:
    """Remembers its answers, so a question about the thousandth expert costs a lookup.

    Regions are passed with target offset 0 (`at_origin`), which makes equal layouts equal keys.
    """

    def __init__(self) -> None:
        self._overlaps: dict[tuple[Region, Region], tuple[Overlap, ...]] = {}
        self._chunks: dict[tuple[Region, Region, int], tuple[Chunk, ...]] = {}
        self._cells: dict[tuple[Region, tuple[Region, ...]], tuple[Cell, ...]] = {}
        self._unions: dict[tuple[Region, ...], tuple[Region, ...]] = {}

    def overlaps(self, held: Region, wanted: Region) -> tuple[Overlap, ...]:
        """Return the elements that both regions contain."""
        key = (held, wanted)
        if (known := self._overlaps.get(key)) is None:
            known = self._overlaps[key] = intersect(held, wanted)
        return known

    def chunks(self, held: Region, wanted: Region, max_elements: int) -> tuple[Chunk, ...]:
        """Return the elements that both regions contain, in blocks of at most `max_elements`."""
        key = (held, wanted, max_elements)
        if (known := self._chunks.get(key)) is None:
            known = self._chunks[key] = tuple(
                Chunk(overlap=o, num_elements=o.num_wire_elements, wire=Strided(0, packed(o.extents)))
                for block in blocks(wanted, max_elements)
                for o in self.overlaps(held, block)
            )
        return known

    def cells(self, wanted: Region, held: tuple[Region, ...]) -> tuple[Cell, ...]:
        """Divide `wanted` into disjoint cells whose elements have the same holders."""
        key = (wanted, held)
        if (known := self._cells.get(key)) is None:
            known = self._cells[key] = tuple(self._divide(wanted, held))
        return known

    def union(self, regions: Iterable[Region]) -> tuple[Region, ...]:
        """Return disjoint regions with the same checkpoint elements as all of `regions` together."""
        key = tuple(sorted(set(regions), key=region_key))
        if (known := self._unions.get(key)) is None:
            disjoint: list[Region] = []
            for region in key:
                disjoint += subtract(region, disjoint, "source")
            known = self._unions[key] = tuple(disjoint)
        return known

    def _divide(self, wanted: Region, held: tuple[Region, ...]) -> list[Cell]:
        cells = [Cell(region=wanted, holders=())]
        for index, region in enumerate(held):
            divided: list[Cell] = []
            for cell in cells:
                common = self.overlaps(region, cell.region)
                holders = (*cell.holders, index)
                if sum(overlap.num_wire_elements for overlap in common) == cell.region.num_elements:
                    divided.append(Cell(region=cell.region, holders=holders))
                    continue
                divided += [
                    Cell(region=Region(o.extents, source=o.source, target=o.right), holders=holders)
                    for o in common
                ]
                rest = subtract(cell.region, (region,), "source") if common else (cell.region,)
                divided += [Cell(region=part, holders=cell.holders) for part in rest]
            cells = divided
        return cells


def at_origin(region: Region) -> Region:
    """Return `region` with its target offset taken away."""
    if region.target.offset == 0:
        return region
    return Region(region.extents, source=region.source, target=Strided(0, region.target.strides))


def distinct(region: Region) -> tuple[Region, tuple[tuple[int, int], ...]]:
    """Take the replicating loops off `region`; return the rest and the (extent, target stride) of each."""
    loops = list(zip(region.extents, region.source.strides, region.target.strides, strict=True))
    repeats = tuple((n, t) for n, s, t in loops if s == 0 and n > 1)
    if not repeats:
        return region, ()
    kept = [loop for loop in loops if loop[1] != 0 or loop[0] == 1]
    base = Region(
        tuple(n for n, _, _ in kept),
        source=Strided(region.source.offset, tuple(s for _, s, _ in kept)),
        target=Strided(region.target.offset, tuple(t for _, _, t in kept)),
    )
    return base, repeats


def cut(region: Region, loop: int, start: int, stop: int) -> Region:
    """Return the part of `region` in which `start <= index < stop` along one loop."""
    extents = (*region.extents[:loop], stop - start, *region.extents[loop + 1 :])
    source, target = region.source, region.target
    return Region(
        extents,
        source=Strided(source.offset + start * source.strides[loop], source.strides),
        target=Strided(target.offset + start * target.strides[loop], target.strides),
    )


def blocks(region: Region, max_elements: int) -> Iterator[Region]:
    """Divide `region` along its outer loops into blocks of at most `max_elements`, even in size."""
    if region.num_elements <= max_elements:
        yield region
        return
    strides = region.source.strides
    loop = max((k for k, n in enumerate(region.extents) if n > 1), key=lambda k: (abs(strides[k]), -k))
    extent = region.extents[loop]
    rows_per_block = max(1, max_elements // (region.num_elements // extent))
    num_blocks = -(-extent // rows_per_block)
    for k in range(num_blocks):
        part = cut(region, loop, extent * k // num_blocks, extent * (k + 1) // num_blocks)
        yield from blocks(part, max_elements)


def region_key(region: Region) -> tuple[int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return a sort key that distinguishes any two different regions."""
    source, target = region.source, region.target
    return source.offset, target.offset, region.extents, source.strides, target.strides


def packed(extents: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a row-major block without gaps."""
    return tuple(math.prod(extents[k + 1 :]) for k in range(len(extents)))
