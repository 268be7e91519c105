"""Geometry: questions about regions, answered once for each class of equal layers, experts and ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from wbridge.layout.algebra import intersect, subtract
from wbridge.layout.nest import source_nest
from wbridge.layout.region import Overlap, Region, Strided

_PAIR: Final = 2**48
"""More than a block has elements: two numbers travel through the algebra in one, since it only adds them."""


class Atom(msgspec.Struct, frozen=True):
    """Elements that exactly these of some regions contain, by index."""

    region: Region
    members: tuple[int, ...]
    first: int
    last: int
    """The checkpoint elements between which they lie."""


class Shared(msgspec.Struct, frozen=True):
    """Elements that the same needed regions and the same held ones contain; none held means missing."""

    region: Region
    held: tuple[int, ...]
    needed: tuple[int, ...]


class Chunk(msgspec.Struct, frozen=True):
    """Elements of a block as one loop nest on both sides, and where they lie in the block on the wire."""

    overlap: Overlap
    wire: Strided


class Geometry:
    """Remembers its answers, so a question about the thousandth expert costs a lookup.

    Regions are passed with target offset 0 (`at_origin`), which makes equal layouts equal keys.
    """

    def __init__(self) -> None:
        self._overlaps: dict[tuple[Region, Region], tuple[Overlap, ...]] = {}
        self._chunks: dict[tuple[Region, Region, Region], tuple[Chunk, ...]] = {}
        self._atoms: dict[tuple[Region, ...], tuple[Atom, ...]] = {}
        self._shared: dict[tuple[tuple[Region, ...], tuple[Region, ...]], tuple[Shared, ...]] = {}
        self._blocks: dict[tuple[Region, int], tuple[Region, ...]] = {}

    def overlaps(self, held: Region, wanted: Region) -> tuple[Overlap, ...]:
        """Return the elements that both regions contain."""
        key = (held, wanted)
        if (known := self._overlaps.get(key)) is None:
            known = self._overlaps[key] = intersect(held, wanted)
        return known

    def chunks(self, held: Region, wanted: Region, block: Region) -> tuple[Chunk, ...]:
        """Return how `block` lies on both sides, both of which contain it, and on the wire between them.

        On the wire it is dense and in the order of its own loops, whoever writes or takes it.
        """
        key = (held, wanted, block)
        if (known := self._chunks.get(key)) is None:
            on_wire = Region(block.extents, block.source, Strided(0, packed(block.extents)))
            known = self._chunks[key] = tuple(
                _chunk(both)
                for sent in self.overlaps(held, on_wire)
                for both in self.overlaps(_paired(sent), wanted)
            )
        return known

    def blocks(self, region: Region, max_elements: int) -> tuple[Region, ...]:
        """Divide `region` into blocks of at most `max_elements`, in order."""
        key = (region, max_elements)
        if (known := self._blocks.get(key)) is None:
            known = self._blocks[key] = tuple(blocks(region, max_elements))
        return known

    def shared(self, held: tuple[Region, ...], needed: tuple[Region, ...]) -> tuple[Shared, ...]:
        """Divide what `needed` regions contain by who needs and who holds it."""
        key = (held, needed)
        if (known := self._shared.get(key)) is None:
            parts = self.atoms(held)
            known = self._shared[key] = tuple(
                shared for wanted in self.atoms(needed) for shared in self._shared_by(wanted, parts)
            )
        return known

    def _shared_by(self, wanted: Atom, parts: tuple[Atom, ...]) -> Iterator[Shared]:
        rest = wanted.region.num_elements
        for atom in parts:
            if atom.first > wanted.last or wanted.first > atom.last:
                continue
            for overlap in self.overlaps(atom.region, wanted.region):
                rest -= overlap.num_wire_elements
                yield Shared(overlap.right_region, atom.members, wanted.members)
        if rest:
            missing = subtract(wanted.region, [atom.region for atom in parts], "source")
            yield from (Shared(part, (), wanted.members) for part in missing)

    def atoms(self, regions: tuple[Region, ...]) -> tuple[Atom, ...]:
        """Divide the union of `regions` into disjoint parts that lie in the same of them."""
        if (known := self._atoms.get(regions)) is None:
            added = [(k, part) for k, region in enumerate(regions) for part in _without_repeats(region)]
            atoms: list[Atom] = []
            last = -1
            for index, region in sorted(added, key=lambda pair: source_nest(pair[1])[0].key):
                new = _atom(region, (index,))
                atoms = [*self._added(atoms, new)] if new.first <= last else [*atoms, new]
                last = max(last, new.last)
            known = self._atoms[regions] = tuple(sorted(atoms, key=_atom_key))
        return known

    def _added(self, atoms: Iterable[Atom], new: Atom) -> Iterator[Atom]:
        rest = [new.region]
        for atom in atoms:
            apart = atom.first > new.last or new.first > atom.last
            common = () if apart else self.overlaps(new.region, atom.region)
            if not common:
                yield atom
                continue
            members = tuple(sorted({*atom.members, *new.members}))
            if sum(overlap.num_wire_elements for overlap in common) == atom.region.num_elements:
                yield Atom(atom.region, members, atom.first, atom.last)
            else:
                yield from (_atom(overlap.right_region, members) for overlap in common)
                outside = subtract(atom.region, (new.region,), "source")
                yield from (_atom(part, atom.members) for part in outside)
            rest = [left for part in rest for left in subtract(part, (atom.region,), "source")]
        yield from (_atom(part, new.members) for part in rest)


def _paired(overlap: Overlap) -> Region:
    """Return the elements with both numbers in one; the right ones are small and not negative."""
    left, right = overlap.left, overlap.right
    strides = tuple(a * _PAIR + b for a, b in zip(left.strides, right.strides, strict=True))
    return Region(overlap.extents, overlap.source, Strided(left.offset * _PAIR + right.offset, strides))


def _chunk(both: Overlap) -> Chunk:
    """Take the two numbers of each element apart again: loops add them up, so that they stay apart."""
    offset = divmod(both.left.offset, _PAIR)
    strides = [divmod(stride, _PAIR) for stride in both.left.strides]
    held = Strided(offset[0], tuple(stride for stride, _ in strides))
    wire = Strided(offset[1], tuple(stride for _, stride in strides))
    return Chunk(Overlap(both.extents, both.source, held, both.right), wire)


def _atom(region: Region, members: tuple[int, ...]) -> Atom:
    nest, _ = source_nest(region)
    return Atom(region, members, nest.key, nest.last)


def _atom_key(atom: Atom) -> tuple[object, ...]:
    return atom.first, region_key(atom.region)


def _without_repeats(region: Region) -> tuple[Region, ...]:
    """Return regions that contain each checkpoint element of `region` once."""
    base, _ = distinct(region)
    nest, _ = source_nest(base)
    if nest.is_nested:
        return (base,)
    span = Region((nest.last - nest.key + 1,), Strided(nest.key, (1,)), Strided(0, (1,)))
    return tuple(overlap.right_region for overlap in intersect(base, span))


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
