"""Failures reported against other systems (C numbers), as layouts moved from holder to holder."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from wbridge.errors import CoverageError
from wbridge.layout.algebra import intersect, subtract
from wbridge.layout.coverage import check_coverage, uncovered
from wbridge.layout.region import Region, Strided
from wbridge.layout.source_map import Mapped, ParameterSpec, SourceMap, TensorSpec

UNWRITTEN = -1


def shard_rows(start: int, stop: int, width: int, *, at: int = 0) -> list[Region]:
    """Return checkpoint rows [start, stop) held from row `at` on: one region, or none when empty."""
    if start == stop:
        return []
    return [Region(((stop - start) * width,), Strided(start * width, (1,)), Strided(at * width, (1,)))]


def offsets(extents: tuple[int, ...], side: Strided) -> list[int]:
    return [
        side.offset + sum(i * s for i, s in zip(index, side.strides, strict=True))
        for index in itertools.product(*map(range, extents))
    ]


def holding(regions: Sequence[Region], num_elements: int) -> list[int]:
    """Return the storage of a holder: each element is its checkpoint index."""
    storage = [UNWRITTEN] * num_elements
    for region in regions:
        pairs = zip(
            offsets(region.extents, region.target), offsets(region.extents, region.source), strict=True
        )
        for target, source in pairs:
            storage[target] = source
    return storage


def moved(senders: Sequence[Sequence[Region]], receiver: Sequence[Region], num_elements: int) -> list[int]:
    """Return the receiver's storage after each sender has written what only it has to give."""
    storage = [UNWRITTEN] * num_elements
    wanted = list(receiver)
    for sender in senders:
        values = holding(sender, 1 + max((max(offsets(r.extents, r.target)) for r in sender), default=0))
        for left, right in itertools.product(sender, wanted):
            for overlap in intersect(left, right):
                reads, writes = (
                    offsets(overlap.extents, overlap.left),
                    offsets(overlap.extents, overlap.right),
                )
                for read, write in zip(reads, writes, strict=True):
                    assert storage[write] == UNWRITTEN
                    storage[write] = values[read]
        wanted = [rest for region in wanted for rest in subtract(region, sender, "source")]
    assert not wanted
    return storage


def test_c04_vocabulary_padding_leaves_only_the_padding_unfed() -> None:
    """1003 embedding rows go to 4 ranks of 256 rows: the last has 235 real ones."""
    width, num_rows = 3, 1003
    senders = [shard_rows(0, 502, width), shard_rows(502, num_rows, width)]
    parameter = ParameterSpec((256, width), (width, 1), "bfloat16")
    for rank in range(4):
        start, stop = 256 * rank, min(256 * (rank + 1), num_rows)
        receiver = shard_rows(start, stop, width)
        storage = moved(senders, receiver, 256 * width)
        num_real = (stop - start) * width
        assert storage[:num_real] == list(range(start * width, stop * width))
        assert storage[num_real:] == [UNWRITTEN] * (256 * width - num_real)
        missing = uncovered(parameter, receiver)
        assert (missing.num_elements if missing else 0) == 256 * width - num_real
    assert missing is not None and missing.example == (235, 0)


def test_c04_padding_must_be_declared() -> None:
    padded = SourceMap(
        checkpoint={"embed": TensorSpec((1003, 3), "bfloat16")},
        parameters={"embed": ParameterSpec((1024, 3), (3, 1), "bfloat16")},
        mapped=tuple(Mapped("embed", "embed", region) for region in shard_rows(0, 1003, 3)),
    )
    with pytest.raises(CoverageError, match="63 of 3072 elements have no checkpoint source"):
        check_coverage(padded)
    assert check_coverage(padded, allow_unfed=["embed"]) == (("embed", 63),)


def test_c04_a_trainer_that_pads_keeps_its_padding() -> None:
    """The trainer's shards hold 512 rows each, the last with 21 rows that are in no checkpoint."""
    senders = [shard_rows(0, 512, 2), shard_rows(512, 1003, 2)]
    assert moved(senders, shard_rows(0, 1003, 2), 2006) == list(range(2006))


@pytest.mark.parametrize("width", [16, 1])
def test_c06_each_kv_head_reaches_both_ranks_that_share_it(width: int) -> None:
    """8 heads of 4 rows on 16 ranks, as weights and as 1-D norms."""
    head_rows = 4
    senders = [shard_rows(0, 13, width), shard_rows(13, 32, width)]
    for rank in range(16):
        head = rank // 2
        receiver = shard_rows(head * head_rows, (head + 1) * head_rows, width)
        first = head * head_rows * width
        assert moved(senders, receiver, head_rows * width) == list(range(first, first + head_rows * width))


def test_c06_heads_replicated_inside_one_parameter_travel_once() -> None:
    replicated = Region((8, 2, 8), Strided(0, (8, 0, 1)), Strided(0, (16, 8, 1)))
    (whole,) = shard_rows(0, 8, 8)
    (overlap,) = intersect(whole, replicated)
    assert overlap.num_wire_elements == 64
    expected = [head * 8 + i for head in range(8) for _ in range(2) for i in range(8)]
    assert moved([[whole]], [replicated], 128) == expected


@pytest.mark.parametrize("splits", [((0, 3), (3, 5)), ((0, 5), (5, 5)), ((0, 2), (2, 4), (4, 5), (5, 5))])
def test_c21_uneven_and_empty_shards_are_placed_by_their_offsets(splits: tuple[tuple[int, int], ...]) -> None:
    """5 rows over any sharding, to tensor parallel halves of the columns."""
    width = 4
    senders = [shard_rows(start, stop, width) for start, stop in splits]
    for rank in range(2):
        receiver = [Region((5, 2), Strided(2 * rank, (width, 1)), Strided(0, (2, 1)))]
        expected = [row * width + 2 * rank + column for row in range(5) for column in range(2)]
        assert moved(senders, receiver, 10) == expected


def test_c22_shards_without_elements_take_part_on_both_sides() -> None:
    """3 rows over 4 ranks: the last holds nothing, needs nothing and is covered."""
    ranks = [shard_rows(min(rank, 3), min(rank + 1, 3), 2) for rank in range(4)]
    assert ranks[3] == []
    for rank, receiver in enumerate(ranks):
        num_rows = 1 if receiver else 0
        parameter = ParameterSpec((num_rows, 2), (2, 1), "float32")
        assert uncovered(parameter, receiver) is None
        assert moved(ranks, receiver, num_rows * 2) == list(range(rank * 2, rank * 2 + num_rows * 2))


STORED = {
    "contiguous": Region((4, 6), Strided(0, (6, 1)), Strided(0, (6, 1))),
    "transposed": Region((4, 6), Strided(0, (6, 1)), Strided(0, (1, 4))),
    "padded": Region((4, 6), Strided(0, (6, 1)), Strided(3, (9, 1))),
    "every other": Region((4, 6), Strided(0, (6, 1)), Strided(1, (24, 2))),
    "permuted": Region((2, 2, 6), Strided(0, (12, 6, 1)), Strided(0, (1, 12, 2))),
    "interleaved": Region((2, 2, 6), Strided(0, (12, 6, 1)), Strided(0, (6, 12, 1))),
}


@pytest.mark.parametrize("receiver", STORED)
@pytest.mark.parametrize("sender", STORED)
def test_c24_strides_are_followed_on_both_sides(sender: str, receiver: str) -> None:
    wanted = STORED[receiver]
    assert moved([[STORED[sender]]], [wanted], 100) == holding([wanted], 100)
    assert len(intersect(STORED[sender], wanted)) == 1


def test_c24_an_expanded_holder_gives_its_one_element_to_all() -> None:
    """A row stored once and expanded to four checkpoint rows (stride 0 in the holder)."""
    expanded = Region((4, 6), Strided(0, (6, 1)), Strided(0, (0, 1)))
    (overlap,) = intersect(expanded, STORED["transposed"])
    reads, writes = offsets(overlap.extents, overlap.left), offsets(overlap.extents, overlap.right)
    assert sorted(zip(writes, reads, strict=True)) == [(i, i // 4) for i in range(24)]


def test_c24_an_expanded_destination_is_refused() -> None:
    expanded = SourceMap(
        checkpoint={"w": TensorSpec((4, 6), "float32")},
        parameters={"w": ParameterSpec((4, 6), (0, 1), "float32")},
        mapped=(Mapped("w", "w", Region((4, 6), Strided(0, (6, 1)), Strided(0, (0, 1)))),),
    )
    with pytest.raises(
        CoverageError, match=r"element \(0, 0\) is written by tensor 'w' and again by tensor 'w'"
    ):
        check_coverage(expanded)
