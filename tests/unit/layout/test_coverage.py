"""Coverage errors name the parameter, the element and the remedy."""

from __future__ import annotations

import pytest

from wbridge.errors import CoverageError, LayoutError
from wbridge.layout.coverage import Clash, Missing, check_coverage, doubly_covered, out_of_bounds, uncovered
from wbridge.layout.region import Region, Strided
from wbridge.layout.source_map import Mapped, OpaqueTarget, ParameterSpec, SourceMap, TensorSpec


def rows(
    start: int, stop: int, *, width: int = 4, stride: int | None = None, at: int | None = None
) -> Region:
    """Return checkpoint rows [start, stop), held from row `at` of a parameter with that row stride."""
    stride = width if stride is None else stride
    first = start if at is None else at
    return Region(
        (stop - start, width), Strided(start * width, (width, 1)), Strided(first * stride, (stride, 1))
    )


def source_map(parameter: ParameterSpec, *mapped: tuple[str, Region], opaque: bool = False) -> SourceMap:
    return SourceMap(
        checkpoint={"w": TensorSpec((8, 4), "float32"), "v": TensorSpec((8, 4), "float32")},
        parameters={"layer.weight": parameter},
        mapped=tuple(Mapped("layer.weight", tensor, region) for tensor, region in mapped),
        opaque=(OpaqueTarget("layer.weight", ("w",), "mul"),) if opaque else (),
    )


EIGHT_ROWS = ParameterSpec((8, 4), (4, 1), "float32")
PADDED = ParameterSpec((8, 4), (6, 1), "float32")
COLUMN_MAJOR = ParameterSpec((8, 4), (1, 8), "float32")


def test_an_exact_cover_has_nothing_to_report() -> None:
    assert check_coverage(source_map(EIGHT_ROWS, ("w", rows(0, 3)), ("w", rows(3, 8)))) == ()


def test_missing_elements_are_counted_with_an_example_and_a_remedy() -> None:
    with pytest.raises(CoverageError, match=r"'layer.weight': 8 of 32 .* example \(3, 0\).* allow_unfed"):
        check_coverage(source_map(EIGHT_ROWS, ("w", rows(0, 3)), ("w", rows(5, 8))))


def test_declared_gaps_are_returned() -> None:
    incomplete = source_map(EIGHT_ROWS, ("w", rows(0, 3)))
    assert check_coverage(incomplete, allow_unfed=["other.*", "layer.*"]) == (("layer.weight", 20),)


def test_a_second_write_names_both_tensors() -> None:
    with pytest.raises(
        CoverageError, match=r"element \(3, 0\) is written by tensor 'w' and again by tensor 'v'"
    ):
        check_coverage(source_map(EIGHT_ROWS, ("w", rows(0, 4)), ("v", rows(3, 8))), allow_unfed=["*"])


def test_padding_between_rows_is_out_of_bounds() -> None:
    assert uncovered(PADDED, [rows(0, 8, stride=6)]) is None
    assert out_of_bounds(PADDED, [rows(0, 8, stride=6)]) is None
    with pytest.raises(CoverageError, match="'w' writes outside it"):
        check_coverage(source_map(PADDED, ("w", rows(0, 8))), allow_unfed=["*"])


def test_a_region_beyond_its_tensor_is_refused() -> None:
    with pytest.raises(CoverageError, match=r"reads elements 4 to 35 of tensor 'w', which has 32"):
        check_coverage(source_map(EIGHT_ROWS, ("w", rows(1, 9, at=0))))


def test_a_column_major_parameter_reports_its_own_index() -> None:
    first_two_columns = Region((2, 8), Strided(0, (1, 4)), Strided(0, (8, 1)))
    assert uncovered(COLUMN_MAJOR, [first_two_columns]) == Missing(16, (0, 2))
    assert doubly_covered(COLUMN_MAJOR, [first_two_columns] * 2) == Clash(0, 1, (0, 0))


def test_an_expanded_parameter_counts_its_memory_once() -> None:
    expanded = ParameterSpec((8, 4), (0, 1), "float32")
    assert uncovered(expanded, []) == Missing(4, (0, 0))
    assert uncovered(expanded, [rows(0, 1)]) is None
    assert doubly_covered(expanded, [rows(0, 8, stride=0)]) == Clash(0, 0, (0, 0))


def test_an_empty_parameter_is_covered_by_nothing() -> None:
    empty = ParameterSpec((0, 4), (4, 1), "float32")
    assert uncovered(empty, []) is None
    assert out_of_bounds(empty, [rows(0, 1)]) == 0
    assert check_coverage(source_map(empty)) == ()


def test_a_scalar_needs_its_element() -> None:
    scalar = ParameterSpec((), (), "float32")
    assert uncovered(scalar, []) == Missing(1, ())
    assert uncovered(scalar, [Region((), Strided(3, ()), Strided(0, ()))]) is None


def test_an_opaque_parameter_is_left_to_its_loader() -> None:
    assert check_coverage(source_map(EIGHT_ROWS, opaque=True)) == ()


def test_a_fused_expert_parameter_is_checked_region_by_region() -> None:
    """384 experts of gate, up and down rows each: fast only if no pair of regions is looked at twice."""
    num_experts, height, width = 384, 6, 8
    parameter = ParameterSpec((num_experts, height, width), (height * width, width, 1), "bfloat16")
    regions = [
        rows(0, 2, width=width, at=height * expert + 2 * part)
        for part in range(3)
        for expert in reversed(range(num_experts))
    ]
    assert doubly_covered(parameter, regions) is None
    assert uncovered(parameter, regions) is None
    assert uncovered(parameter, regions[1:]) == Missing(16, (383, 0, 0))


def test_a_map_that_names_an_unknown_tensor_is_refused() -> None:
    with pytest.raises(LayoutError, match="checkpoint tensor 'missing'"):
        source_map(EIGHT_ROWS, ("missing", rows(0, 8)))


def test_a_map_lists_its_regions_by_tensor() -> None:
    found = source_map(EIGHT_ROWS, ("w", rows(0, 3)), ("v", rows(3, 5)), ("w", rows(5, 8)))
    by_tensor = found.by_tensor()
    assert list(by_tensor) == ["w", "v"]
    assert [m.region for m in by_tensor["w"]] == [rows(0, 3), rows(5, 8)]
    assert found.num_bytes == 8 * 4 * 4
