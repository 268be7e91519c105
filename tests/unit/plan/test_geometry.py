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


def test_cells_divide_the_wanted_region_by_its_holders() -> None:
    wanted = box((0, 6), (0, 4))
    held = (box((0, 3), (0, 4)), box((2, 6), (0, 2)), box((2, 6), (0, 2)))
    found: dict[int, tuple[int, ...]] = {}
    for cell in Geometry().cells(wanted, held):
        for source, target in elements(cell.region):
            assert target == source  # the whole tensor, held densely
            assert source not in found
            found[source] = cell.holders
    assert found == {
        source: tuple(k for k, region in enumerate(held) if source in sources(region)) for source in range(24)
    }


def test_a_region_that_is_held_in_one_piece_is_not_rewritten() -> None:
    wanted = box((1, 3), (1, 3))
    (cell,) = Geometry().cells(wanted, (box((0, 6), (0, 4)),))
    assert cell.region is wanted


def test_chunks_are_small_enough_and_together_all() -> None:
    whole, wanted = box((0, 6), (0, 4)), box((0, 6), (1, 4))
    chunks = Geometry().chunks(whole, wanted, 5)
    assert max(chunk.num_elements for chunk in chunks) <= 5
    assert all(chunk.wire.strides == packed(chunk.overlap.extents) for chunk in chunks)
    arrived = [
        target
        for chunk in chunks
        for _, target in elements(Region(chunk.overlap.extents, chunk.overlap.source, chunk.overlap.right))
    ]
    assert sorted(arrived) == list(range(18))


def test_a_union_counts_shared_elements_once() -> None:
    regions = [box((0, 4), (0, 2)), box((2, 6), (0, 4)), box((0, 4), (0, 2))]
    union = Geometry().union(regions)
    assert sum(region.num_elements for region in union) == len(set().union(*map(sources, regions)))
    assert set().union(*map(sources, union)) == set().union(*map(sources, regions))


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
