"""Decoding index pairs, and following random view and copy chains, agrees with brute force."""

from __future__ import annotations

from itertools import product

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.models.replay import Weights, assert_exact, traced
from wbridge.discovery.decode import decode
from wbridge.layout.region import Region


def pairs_of(region: Region) -> list[tuple[int, int]]:
    return [
        (
            region.source.offset + sum(i * s for i, s in zip(index, region.source.strides, strict=True)),
            region.target.offset + sum(i * s for i, s in zip(index, region.target.strides, strict=True)),
        )
        for index in product(*(range(n) for n in region.extents))
    ]


@given(st.lists(st.integers(0, 20), max_size=40))
def test_decode_visits_exactly_the_pairs(source: list[int]) -> None:
    regions = decode(torch.tensor(source, dtype=torch.int64), torch.arange(len(source)))
    assert sorted(p for region in regions for p in pairs_of(region)) == sorted(
        zip(source, range(len(source)), strict=False)
    )
    assert all(s >= 0 for region in regions for s in (*region.source.strides, *region.target.strides))


@given(st.permutations(range(4)), st.lists(st.integers(2, 4), min_size=4, max_size=4))
def test_decode_finds_any_permutation_of_dimensions_in_one_region(order: list[int], sizes: list[int]) -> None:
    source = torch.arange(torch.Size(sizes).numel()).view(sizes).permute(order).reshape(-1)
    assert len(decode(source, torch.arange(source.numel()))) == 1


MOVES = (
    lambda t, k: t.t(),
    lambda t, k: t.contiguous(),
    lambda t, k: t.reshape(-1).view(t.shape[1], t.shape[0]) if t.is_contiguous() else t.reshape(t.shape),
    lambda t, k: t[k % t.shape[0] :],
    lambda t, k: t[:, :: 1 + k % 2],
    lambda t, k: torch.cat([t, t[: 1 + k % t.shape[0]]]),
    lambda t, k: torch.stack([t, t], k % 3).flatten(0, 1),
    lambda t, k: t.repeat(1 + k % 2, 1),
    lambda t, k: t[torch.arange(t.shape[0]) * (k + 1) % t.shape[0]],
    lambda t, k: torch.nn.functional.pad(t, (k % 2, 0, 0, 1)),
    lambda t, k: t.to(torch.float64),
)


@given(st.lists(st.tuples(st.integers(0, len(MOVES) - 1), st.integers(0, 5)), max_size=5))
def test_chains_of_moves_are_followed_bit_for_bit(chain: list[tuple[int, int]]) -> None:
    weights = {"x": torch.arange(1.0, 25.0).view(4, 6)}

    def moved(t: torch.Tensor) -> torch.Tensor:
        for move, k in chain:
            t = MOVES[move](t, k)[:12, :12]
        return t

    w = {"p": torch.zeros(moved(weights["x"]).shape)}

    def load(t: Weights) -> object:
        return w["p"].copy_(moved(t["x"]))

    assert not assert_exact(traced(weights, w, load), weights, w, load).opaque


BOX = st.tuples(st.integers(0, 5), st.integers(1, 3), st.integers(0, 5), st.integers(1, 3), st.booleans())


@given(st.lists(BOX, max_size=6))
def test_last_writer_wins_element_by_element(boxes: list[tuple[int, int, int, int, bool]]) -> None:
    weights = {"x": torch.arange(1.0, 37.0).view(6, 6), "y": -torch.arange(1.0, 37.0).view(6, 6)}
    w = {"p": torch.zeros(8, 8)}

    def load(t: Weights) -> None:
        for row, row_step, column, column_step, is_y in boxes:
            source = t["y" if is_y else "x"][: 6 - row : row_step, : 6 - column : column_step]
            target = w["p"][row:6:row_step, column:6:column_step]
            target.copy_(source[: target.shape[0], : target.shape[1]])

    source_map = assert_exact(traced(weights, w, load), weights, w, load)
    assert sum(m.region.num_elements for m in source_map.mapped) == int((w["p"] != 0).sum())
