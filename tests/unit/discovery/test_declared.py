"""Declared boxes and regions: exact, bounded, and with the names of what is wrong."""

from __future__ import annotations

import pytest
import torch

from tests.models.replay import replay
from wbridge.discovery.declared import Shard, declare
from wbridge.discovery.specs import specs_of
from wbridge.errors import LayoutError
from wbridge.layout.region import Region, Strided
from wbridge.layout.source_map import Mapped

WEIGHTS = {"a": torch.randn(5, 6), "b": torch.randn(5), "s": torch.tensor(3.0)}


def test_c21_c22_uneven_and_empty_shards() -> None:
    rows = [(0, 2), (2, 2), (4, 1), (5, 0)]
    for start, size in rows:
        w = {"w": torch.zeros(size, 6), "s": torch.zeros(())}
        shards = [Shard("w", "a", (start, 0), (size, 6)), Shard("s", "s", (), ())]
        source_map = declare(checkpoint=specs_of(WEIGHTS), parameters=w, shards=shards)
        replay(source_map, WEIGHTS, w)
        assert torch.equal(w["w"], WEIGHTS["a"][start : start + size])
        assert w["s"] == 3
        assert source_map.unfed == ()
        assert source_map.method == "declared"


def test_c20_sharded_and_whole_parameters_in_one_map() -> None:
    w = {"w": torch.zeros(5, 3), "b": torch.zeros(5)}
    shards = [Shard("w", "a", (0, 3), (5, 3)), Shard("b", "b", (0,), (5,))]
    replay(declare(checkpoint=specs_of(WEIGHTS), parameters=w, shards=shards), WEIGHTS, w)
    assert torch.equal(w["w"], WEIGHTS["a"][:, 3:])
    assert torch.equal(w["b"], WEIGHTS["b"])


def test_strided_shard_is_several_boxes_with_local_starts() -> None:
    w = {"w": torch.zeros(6, 2).t()}
    shards = [
        Shard("w", "a", (0, 0), (1, 6), (0, 0)),
        Shard("w", "a", (4, 0), (1, 6), (1, 0)),
    ]
    source_map = declare(checkpoint=specs_of(WEIGHTS), parameters=w, shards=shards)
    replay(source_map, WEIGHTS, w)
    assert torch.equal(w["w"], WEIGHTS["a"][[0, 4]])


def test_explicit_region_and_its_bounds() -> None:
    w = {"w": torch.zeros(6, 5)}
    flipped = Region((5, 6), Strided(0, (6, 1)), Strided(0, (1, 5)))
    source_map = declare(checkpoint=specs_of(WEIGHTS), parameters=w, regions=[Mapped("w", "a", flipped)])
    replay(source_map, WEIGHTS, w)
    assert torch.equal(w["w"], WEIGHTS["a"].t())
    outside = Region((5, 6), Strided(1, (6, 1)), Strided(0, (1, 5)))
    with pytest.raises(LayoutError, match=r"tensor 'a' reaches elements 1\.\.30, outside 0\.\.29"):
        declare(checkpoint=specs_of(WEIGHTS), parameters=w, regions=[Mapped("w", "a", outside)])
    with pytest.raises(LayoutError, match="names 'c'"):
        declare(checkpoint=specs_of(WEIGHTS), parameters=w, regions=[Mapped("w", "c", flipped)])


def test_c05_global_indices_cannot_be_taken_for_local_ones() -> None:
    weights = {"embed": torch.randn(16, 2)}
    w = {"embed": torch.zeros(8, 2)}
    second = Shard("embed", "embed", (8, 0), (8, 2))
    replay(declare(checkpoint=specs_of(weights), parameters=w, shards=[second]), weights, w)
    assert torch.equal(w["embed"], weights["embed"][8:])
    for wrong in (Shard("embed", "embed", (16, 0), (8, 2)), Shard("embed", "embed", (0, 0), (16, 2))):
        with pytest.raises(LayoutError, match=r"reaches outside the (global|local) shape"):
            declare(checkpoint=specs_of(weights), parameters=w, shards=[wrong])
    with pytest.raises(LayoutError, match="names 'head'"):
        declare(checkpoint=specs_of(weights), parameters=w, shards=[Shard("head", "embed", (0, 0), (8, 2))])
