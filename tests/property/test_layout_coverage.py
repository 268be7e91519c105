"""Coverage agrees with counting the writes to each parameter element."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tests.property.layout_strategies import elements, pairs, row_major
from wbridge.layout.algebra import subtract
from wbridge.layout.coverage import doubly_covered, out_of_bounds, uncovered
from wbridge.layout.region import Region, Strided
from wbridge.layout.source_map import ParameterSpec

SHAPES = st.lists(st.integers(1, 6), max_size=3).map(tuple)


@st.composite
def parameters(draw: st.DrawFn) -> ParameterSpec:
    """A parameter with rows padded, dims in any order in memory, and perhaps one expanded dim."""
    shape = draw(SHAPES)
    order = draw(st.permutations(range(len(shape))))
    packed = row_major(tuple(shape[k] for k in order), draw(st.sampled_from([0, 0, 2])))
    strides = [0] * len(shape)
    for k, stride in zip(order, packed, strict=True):
        strides[k] = stride
    if shape and draw(st.sampled_from([False, False, True])):
        strides[draw(st.integers(0, len(shape) - 1))] = 0
    return ParameterSpec(shape, tuple(strides), "float32")


@st.composite
def boxes(draw: st.DrawFn, parameter: ParameterSpec) -> Region:
    """A slice, with steps, of the parameter's memory."""
    extents, offset, strides = [], 0, []
    for n, s in zip(parameter.shape, parameter.strides, strict=True):
        start = draw(st.integers(0, n - 1))
        step = draw(st.sampled_from([1, 1, 2]))
        extents.append(len(range(start, draw(st.integers(start + 1, n)), step)) if s else 1)
        offset += start * s
        strides.append(step * s)
    return Region(tuple(extents), Strided(0, row_major(tuple(extents))), Strided(offset, tuple(strides)))


def memory(parameter: ParameterSpec) -> dict[int, set[tuple[int, ...]]]:
    """Return the indices of the element at each offset."""
    found: dict[int, set[tuple[int, ...]]] = {}
    for index in itertools.product(*map(range, parameter.shape)):
        offset = sum(i * s for i, s in zip(index, parameter.strides, strict=True))
        found.setdefault(offset, set()).add(index)
    return found


@given(parameters().flatmap(lambda p: st.tuples(st.just(p), st.lists(boxes(p), max_size=4))))
def test_coverage_counts_what_is_missing_and_finds_what_is_doubled(
    case: tuple[ParameterSpec, list[Region]],
) -> None:
    parameter, regions = case
    offsets = memory(parameter)
    writes = Counter(target for region in regions for _, target in pairs(region))
    missing = uncovered(parameter, regions)
    unwritten = offsets.keys() - writes.keys()
    assert (missing.num_elements if missing else 0) == len(unwritten)
    if missing:
        assert any(missing.example in offsets[offset] for offset in unwritten)
    clash = doubly_covered(parameter, regions)
    doubled = {offset for offset, count in writes.items() if count > 1}
    assert (clash is not None) == bool(doubled)
    if clash:
        assert any(clash.example in offsets[offset] for offset in doubled)
        first, second = (pairs(regions[index]) for index in (clash.first, clash.second))
        assert {t for _, t in first} & {t for _, t in second}
    assert out_of_bounds(parameter, regions) is None


@given(parameters(), st.integers(-3, 60))
def test_a_write_between_or_beyond_the_rows_is_out_of_bounds(parameter: ParameterSpec, offset: int) -> None:
    stray = Region((), Strided(0, ()), Strided(offset, ()))
    assert (out_of_bounds(parameter, [stray]) is None) == (offset in memory(parameter))


@given(parameters().flatmap(lambda p: st.tuples(st.just(p), boxes(p))))
def test_a_region_and_what_it_leaves_cover_exactly(case: tuple[ParameterSpec, Region]) -> None:
    parameter, region = case
    loops = [(n, s) for n, s in zip(parameter.shape, parameter.strides, strict=True) if s]
    extents = tuple(n for n, _ in loops)
    whole = Region(extents, Strided(0, row_major(extents)), Strided(0, tuple(s for _, s in loops)))
    assert len(set(elements(extents, whole.target))) == whole.num_elements
    cover = [region, *subtract(whole, [region], "target")]
    assert uncovered(parameter, cover) is None
    assert doubly_covered(parameter, cover) is None
