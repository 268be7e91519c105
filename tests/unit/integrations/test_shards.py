"""Runs, progressions and boxes agree with torch's own chunking, element for element."""

from __future__ import annotations

import pytest
import torch

from wbridge.integrations.shards import compose, progressions, shard_regions, shard_runs, whole_run
from wbridge.layout.region import Region, Strided


def indices(runs):
    return [run.start + i for run in runs for i in range(run.count)]


@pytest.mark.parametrize("length", [0, 1, 3, 5, 8, 13])
@pytest.mark.parametrize("num_shards", [1, 2, 3, 5])
def test_shard_runs_agree_with_torch_chunk(length, num_shards):
    pieces = list(torch.arange(length).chunk(num_shards)) if length else []
    pieces += [torch.empty(0)] * (num_shards - len(pieces))
    for index in range(num_shards):
        runs = shard_runs(whole_run(length), num_shards=num_shards, index=index)
        assert indices(runs) == pieces[index].tolist()


@pytest.mark.parametrize("length", [8, 9, 12, 7])
@pytest.mark.parametrize(("factor", "num_shards"), [(2, 2), (2, 3), (3, 2), (4, 2)])
def test_strided_shard_agrees_with_torch(length, factor, num_shards):
    from torch.distributed.tensor.placement_types import _StridedShard

    pieces, _ = _StridedShard(0, split_factor=factor)._split_tensor(
        torch.arange(length), num_shards, with_padding=False
    )
    for index in range(num_shards):
        runs = shard_runs(whole_run(length), num_shards=num_shards, index=index, split_factor=factor)
        assert indices(runs) == pieces[index].tolist()
        assert [run.position for run in runs] == [sum(r.count for r in runs[:k]) for k in range(len(runs))]


def test_an_even_strided_shard_is_one_region_however_many_runs():
    runs = shard_runs(whole_run(1024), num_shards=2, index=1, split_factor=64)
    assert len(runs) == 64
    assert len(progressions(runs)) == 1


def test_a_shard_of_a_fused_parameter_holds_parts_of_a_checkpoint_tensor():
    shape, strides = (4, 6, 5), (30, 5, 1)
    tensor = Region((3, 5), Strided(0, (5, 1)), Strided(2 * 30 + 5, (5, 1)))  # expert 2, rows 1..3
    full = torch.arange(120).view(shape)
    runs = [
        shard_runs(whole_run(4), num_shards=2, index=1),
        shard_runs(whole_run(6), num_shards=3, index=0, split_factor=2),
        whole_run(5),
    ]
    local = full[indices(runs[0])][:, indices(runs[1])].contiguous()
    seen = {}
    for shard in shard_regions(runs, strides=strides, local_strides=local.stride()):
        for region in compose(tensor, shard):
            source = torch.arange(15).as_strided(region.extents, region.source.strides, region.source.offset)
            held = local.flatten().as_strided(region.extents, region.target.strides, region.target.offset)
            seen.update(zip(source.flatten().tolist(), held.flatten().tolist(), strict=True))
    wanted = full[2, 1:4].flatten().tolist()
    assert seen == {k: v for k, v in enumerate(wanted) if v in set(local.flatten().tolist())}
