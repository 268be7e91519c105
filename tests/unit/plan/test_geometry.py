from __future__ import annotations

from tests.unit.plan.world import box_region, elements
from wbridge.layout.region import Region, Strided
from wbridge.plan.geometry import Geometry, at_origin, cut, distinct, packed

SHAPE = (6, 4)


def box(rows: tuple[int, int], columns: tuple[int, int]) -> Region:
    region = box_region(SHAPE, (rows, columns))
    assert region is not None
    return region


def sources(region: Region) -> set[int]:
    return {source for source, _ in elements(region)}


def sharing(held: tuple[Region, ...], needed: tuple[Region, ...]) -> dict[int, tuple[object, object]]:
    """Return for each element that somebody needs (who holds it, who needs it)."""
    found: dict[int, tuple[object, object]] = {}
    for shared in Geometry().shared(held, needed):
        for source in sources(shared.region):
            assert source not in found
            found[source] = (shared.held, shared.needed)
    return found


def inside(regions: tuple[Region, ...], element: int) -> tuple[int, ...]:
    return tuple(k for k, region in enumerate(regions) if element in sources(region))


def test_elements_are_divided_by_who_holds_and_who_needs_them() -> None:
    held = (box((0, 3), (0, 4)), box((2, 6), (0, 2)), box((2, 6), (0, 2)))
    needed = (box((0, 6), (1, 4)), box((1, 2), (0, 4)), box((0, 6), (0, 1)))
    assert sharing(held, needed) == {
        source: (inside(held, source), inside(needed, source))
        for source in range(24)
        if inside(needed, source)
    }


def test_atoms_are_disjoint_and_cover_the_union() -> None:
    regions = (box((0, 4), (0, 2)), box((2, 6), (0, 4)), box((0, 4), (0, 2)), box((5, 6), (3, 4)))
    found: dict[int, tuple[int, ...]] = {}
    for atom in Geometry().atoms(regions):
        for source in sources(atom.region):
            assert source not in found
            assert atom.first <= source <= atom.last
            found[source] = atom.members
    assert found == {
        source: inside(regions, source) for source in set().union(*(sources(region) for region in regions))
    }


def test_a_region_that_overlaps_itself_counts_each_element_once() -> None:
    windows = Region((3, 4), source=Strided(0, (2, 1)), target=Strided(0, (4, 1)))
    atoms = Geometry().atoms((windows,))
    assert sum(atom.region.num_elements for atom in atoms) == 8
    assert set().union(*(sources(atom.region) for atom in atoms)) == set(range(8))


def test_blocks_are_small_enough_and_together_all() -> None:
    geometry, whole, wanted = Geometry(), box((0, 6), (0, 4)), box((0, 6), (1, 4))
    blocks = geometry.blocks(wanted, 5)
    chunks = [chunk for block in blocks for chunk in geometry.chunks(whole, wanted, block)]
    assert max(chunk.overlap.num_wire_elements for chunk in chunks) <= 5
    assert all(chunk.wire.strides == packed(chunk.overlap.extents) for chunk in chunks)
    arrived = [target for chunk in chunks for _, target in elements(chunk.overlap.right_region)]
    assert sorted(arrived) == list(range(18))


def test_distinct_takes_replicating_loops_off() -> None:
    region = Region((3, 2, 4, 1), source=Strided(5, (4, 0, 1, 0)), target=Strided(7, (8, 4, 1, 0)))
    base, repeats = distinct(region)
    assert base == Region((3, 4, 1), source=Strided(5, (4, 1, 0)), target=Strided(7, (8, 1, 0)))
    assert repeats == ((2, 4),)
    assert distinct(base) == (base, ())


def test_a_cut_keeps_the_part_between_two_indices() -> None:
    region = box((1, 5), (1, 3))
    kept = cut(region, 0, 1, 3)
    assert list(elements(kept)) == list(elements(region))[2:6]


def test_at_origin_only_moves_the_target() -> None:
    region = Region((2,), source=Strided(3, (1,)), target=Strided(9, (5,)))
    assert at_origin(region) == Region((2,), source=Strided(3, (1,)), target=Strided(0, (5,)))
