"""Layouts of real loaders cost a constant number of overlaps, whatever their size."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from wbridge.errors import LayoutError
from wbridge.layout.algebra import divide, intersect, normalize, split, subtract
from wbridge.layout.region import Overlap, Region, Strided

WIDTH = 64
NUM_ROWS = 1024


def region(extents: tuple[int, ...], offset: int, strides: tuple[int, ...]) -> Region:
    """Return a view of the checkpoint, held contiguously."""
    packed = [math.prod(extents[k + 1 :]) for k in range(len(extents))]
    return Region(extents, Strided(offset, strides), Strided(0, tuple(packed)))


def rows(start: int, stop: int, step: int = 1, width: int = WIDTH) -> Region:
    return region((len(range(start, stop, step)), width), start * width, (step * width, 1))


def columns(start: int, stop: int, step: int = 1) -> Region:
    return region((NUM_ROWS, len(range(start, stop, step))), start, (WIDTH, step))


ROW_INTERLEAVE = region((NUM_ROWS // 2, 2, WIDTH), 0, (WIDTH, NUM_ROWS // 2 * WIDTH, 1))
COLUMN_INTERLEAVE = region((NUM_ROWS, WIDTH // 2, 2), 0, (WIDTH, 1, WIDTH // 2))
TRANSPOSED = region((WIDTH, NUM_ROWS), 0, (1, WIDTH))
# Eight groups of [4 query heads | key | value], 16 rows a head; this is the part the queries fill.
MEGATRON_QUERY = Region((8, 64 * WIDTH), Strided(0, (64 * WIDTH, 1)), Strided(0, (96 * WIDTH, 1)))
UNEVEN = ((0, 341), (341, 700), (700, 1024))
EXPERT_ROWS = 48
EXPERTS = region((16, EXPERT_ROWS, WIDTH), 0, (2 * EXPERT_ROWS * WIDTH, WIDTH, 1))


@pytest.mark.parametrize(
    ("left", "right", "most"),
    [
        (rows(341, 700), rows(86, 400), 1),
        (rows(341, 700), columns(7, 20), 1),
        (columns(0, 32), columns(16, 40), 1),
        (rows(0, 1024, 2), rows(1, 1024, 3), 1),
        (rows(0, 1024, 3), ROW_INTERLEAVE, 2),
        (MEGATRON_QUERY, rows(86, 172), 3),
        (MEGATRON_QUERY, columns(16, 32), 1),
        (MEGATRON_QUERY, region((256, 2, WIDTH), 0, (WIDTH, 256 * WIDTH, 1)), 1),
        (MEGATRON_QUERY, rows(0, 512, 3), 6),
        (COLUMN_INTERLEAVE, rows(86, 172), 1),
        (COLUMN_INTERLEAVE, columns(16, 40), 2),
        (COLUMN_INTERLEAVE, columns(0, 64, 3), 2),
        (TRANSPOSED, rows(86, 172), 1),
        (TRANSPOSED, ROW_INTERLEAVE, 1),
        (TRANSPOSED, COLUMN_INTERLEAVE, 1),
        (ROW_INTERLEAVE, COLUMN_INTERLEAVE, 1),
        (EXPERTS, rows(4 * 96, 12 * 96), 1),
        (EXPERTS, region((16, WIDTH, 96), 0, (96 * WIDTH, 1, WIDTH)), 1),
        (EXPERTS, rows(86, 700), 3),
    ],
)
def test_common_layouts_meet_in_few_overlaps(left: Region, right: Region, most: int) -> None:
    for a, b in ((left, right), (right, left)):
        overlaps = intersect(a, b)
        assert 1 <= len(overlaps) <= most
        rest = subtract(b, [a], "source")
        shared = sum(math.prod(overlap.extents) for overlap in overlaps)
        assert shared + sum(part.num_elements for part in rest) == b.num_elements
        assert len(rest) <= 2 * most + 2


def test_row_interleave_meets_uneven_shards_in_few_overlaps() -> None:
    shards = [rows(start, stop) for start, stop in UNEVEN]
    overlaps = [intersect(shard, ROW_INTERLEAVE) for shard in shards]
    assert [len(found) for found in overlaps] == [1, 2, 1]
    assert sum(math.prod(o.extents) for found in overlaps for o in found) == NUM_ROWS * WIDTH
    assert subtract(ROW_INTERLEAVE, shards, "source") == ()


def test_convolution_reshaped_to_a_matrix_meets_any_cut_in_few_overlaps() -> None:
    flat = region((128, 588), 0, (588, 1))
    channels_last = region((128, 14, 14, 3), 0, (588, 14, 1, 196))
    assert len(intersect(flat, channels_last)) == 1
    assert len(intersect(rows(43, 86, width=588), channels_last)) == 1
    assert len(intersect(channels_last, region((128, 100), 77, (588, 1)))) <= 3


def test_a_range_that_cuts_rows_gives_head_middle_and_tail() -> None:
    ragged = region((1000,), 70, (1,))
    padded = Region((NUM_ROWS, WIDTH), Strided(0, (WIDTH, 1)), Strided(0, (WIDTH + 8, 1)))
    assert len(intersect(ragged, padded)) == 3


def test_a_replicating_destination_keeps_its_loop_and_travels_once() -> None:
    heads = Region((4, 2, 256), Strided(0, (256, 0, 1)), Strided(0, (512, 256, 1)))
    (overlap,) = intersect(rows(0, 16), heads)
    assert overlap == Overlap(
        (4, 256, 2), Strided(0, (256, 1, 0)), Strided(0, (256, 1, 0)), Strided(0, (512, 1, 256))
    )
    assert overlap.num_wire_elements == 1024
    assert overlap.right_region == normalize(heads)


def test_a_replicating_holder_gives_its_first_copy() -> None:
    copies = Region((3, 8), Strided(0, (0, 1)), Strided(5, (8, 1)))
    (overlap,) = intersect(copies, region((8,), 0, (1,)))
    assert overlap == Overlap((8,), Strided(0, (1,)), Strided(5, (1,)), Strided(0, (1,)))


def test_a_holder_whose_windows_overlap_gives_each_element_once() -> None:
    windows = region((5, 4), 0, (2, 1))
    overlaps = intersect(windows, region((12,), 0, (1,)))
    assert sum(math.prod(o.extents) for o in overlaps) == 12
    assert subtract(region((14,), 0, (1,)), [windows], "source") == (
        Region((2,), Strided(12, (1,)), Strided(12, (1,))),
    )


def test_a_holder_too_irregular_to_sort_out_is_refused() -> None:
    with pytest.raises(LayoutError, match="holds elements more than once"):
        intersect(region((2000, 3000), 0, (2, 1)), region((10,), 0, (1,)))


def test_scalars_meet_only_themselves() -> None:
    scalar = Region((), Strided(3, ()), Strided(7, ()))
    assert intersect(scalar, scalar) == (Overlap((), Strided(3, ()), Strided(7, ()), Strided(7, ())),)
    assert intersect(scalar, region((3,), 0, (1,))) == ()
    assert subtract(scalar, [region((4,), 0, (1,))], "source") == ()
    assert subtract(scalar, [region((4,), 0, (1,))], "target") == (scalar,)


def test_a_step_leaves_the_rows_between_in_few_regions() -> None:
    assert len(subtract(rows(0, 1024), [rows(0, 1024, 2)], "source")) == 1
    assert len(subtract(rows(0, 1024), [rows(5, 1000, 3)], "source")) <= 4


def test_normalize_merges_a_contiguous_box() -> None:
    box = Region((2, 1, 3, 4), Strided(5, (12, 99, 4, 1)), Strided(0, (12, 7, 4, 1)))
    assert normalize(box) == Region((24,), Strided(5, (1,)), Strided(0, (1,)))


def test_split_cuts_the_outer_loop_into_like_parts() -> None:
    (overlap,) = intersect(columns(0, 32), rows(0, 100))
    parts = split(overlap, 34 * 32)
    assert [part.extents for part in parts] == [(33, 32), (33, 32), (34, 32)]
    assert [part.source.offset // WIDTH for part in parts] == [0, 33, 66]


def test_divide_prefers_the_loop_that_divides_evenly() -> None:
    (overlap,) = intersect(columns(0, 32), rows(0, 3))
    assert [part.extents for part in divide(overlap, 4)] == [(3, 8)] * 4
    assert [part.extents for part in divide(overlap, 3)] == [(32,)] * 3


@pytest.mark.parametrize("cut", [split, divide])
def test_nothing_is_cut_into_less_than_one(cut: Callable[[Overlap, int], tuple[Overlap, ...]]) -> None:
    (overlap,) = intersect(rows(0, 1), rows(0, 1))
    with pytest.raises(LayoutError, match="at least one"):
        cut(overlap, 0)
