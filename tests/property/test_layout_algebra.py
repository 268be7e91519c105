"""The region algebra agrees with sets of single elements."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tests.property.layout_strategies import SIZES, elements, pairs, region_pairs, regions
from wbridge.layout.algebra import Side, divide, intersect, normalize, split, subtract
from wbridge.layout.region import Overlap, Region, Strided


def overlap_rows(overlap: Overlap) -> list[tuple[int, ...]]:
    return list(elements(overlap.extents, overlap.source, overlap.left, overlap.right))


@given(SIZES.flatmap(regions))
def test_normalize_keeps_the_pairs_and_orders_the_loops(region: Region) -> None:
    normal = normalize(region)
    assert sorted(pairs(normal)) == sorted(pairs(region))
    assert normalize(normal) == normal
    strides = normal.source.strides
    assert 1 not in normal.extents
    assert list(strides) == sorted(strides, reverse=True) and min(strides, default=0) >= 0


@given(SIZES.flatmap(regions), st.data())
def test_normalize_writes_equal_regions_alike(region: Region, data: st.DataObject) -> None:
    """Loops that are split and reordered come back as they were."""
    loops = list(zip(region.extents, region.source.strides, region.target.strides, strict=True))
    pieces = []
    for n, s, t in loops:
        inner = data.draw(st.sampled_from([k for k in range(1, n + 1) if n % k == 0]))
        pieces += [(n // inner, inner * s, inner * t), (inner, s, t)]
    pieces = data.draw(st.permutations(pieces))
    rewritten = Region(
        tuple(n for n, _, _ in pieces),
        Strided(region.source.offset, tuple(s for _, s, _ in pieces)),
        Strided(region.target.offset, tuple(t for _, _, t in pieces)),
    )
    assert normalize(rewritten) == normalize(region)


@given(region_pairs())
def test_intersect_gives_each_shared_destination_element_once(both: tuple[Region, Region]) -> None:
    left, right = both
    held: dict[int, set[int]] = {}
    for source, target in pairs(left):
        held.setdefault(source, set()).add(target)
    found: Counter[tuple[int, int]] = Counter()
    for overlap in intersect(left, right):
        for source, at_left, at_right in overlap_rows(overlap):
            assert at_left in held[source]
            found[source, at_right] += 1
        replicated = [k for k, s in enumerate(overlap.source.strides) if s == 0]
        assert all(overlap.left.strides[k] == 0 for k in replicated)
    assert found == Counter((s, t) for s, t in pairs(right) if s in held)


@given(region_pairs(), st.sampled_from(["source", "target"]))
def test_subtract_leaves_what_the_hole_lacks(both: tuple[Region, Region], side: Side) -> None:
    hole, region = both
    at = 0 if side == "source" else 1
    taken = {pair[at] for pair in pairs(hole)}
    rest = subtract(region, [hole], side)
    assert Counter(p for part in rest for p in pairs(part)) == Counter(
        p for p in pairs(region) if p[at] not in taken
    )
    assert all(normalize(part) == part for part in rest)


@given(SIZES.flatmap(lambda n: st.lists(regions(n), min_size=1, max_size=4)))
def test_subtracting_several_holders_leaves_what_none_of_them_has(all_regions: list[Region]) -> None:
    region, *holes = all_regions
    taken = {source for hole in holes for source, _ in pairs(hole)}
    rest = subtract(region, holes, "source")
    assert sorted(p for part in rest for p in pairs(part)) == sorted(
        p for p in pairs(region) if p[0] not in taken
    )


@given(region_pairs())
def test_what_is_shared_and_what_remains_make_the_whole(both: tuple[Region, Region]) -> None:
    left, right = both
    shared = [overlap.right_region for overlap in intersect(left, right)]
    rest = subtract(right, [left], "source")
    assert sum(part.num_elements for part in (*shared, *rest)) == right.num_elements


@given(SIZES.flatmap(regions), st.integers(1, 40))
def test_split_keeps_every_element_in_order_within_the_limit(region: Region, limit: int) -> None:
    (overlap,) = intersect(region, region)
    parts = split(overlap, limit)
    assert Counter(row for part in parts for row in overlap_rows(part)) == Counter(overlap_rows(overlap))
    assert all(part.num_wire_elements <= limit for part in parts)
    assert len(parts) <= 2 * math.ceil(overlap.num_wire_elements / limit)
    if 0 not in overlap.source.strides:  # otherwise each part repeats the replicating loops
        assert [row for part in parts for row in overlap_rows(part)] == overlap_rows(overlap)


@given(SIZES.flatmap(regions), st.integers(1, 9))
def test_divide_gives_parts_of_like_size(region: Region, num_parts: int) -> None:
    (overlap,) = intersect(region, region)
    parts = divide(overlap, num_parts)
    assert Counter(row for part in parts for row in overlap_rows(part)) == Counter(overlap_rows(overlap))
    wire = overlap.num_wire_elements
    assert len(parts) == min(num_parts, wire)
    assert max(part.num_wire_elements for part in parts) <= 2 * math.ceil(wire / num_parts)
