"""Runs, progressions and boxes agree with torch's own chunking, element for element."""

from __future__ import annotations

import pytest
import torch

from wbridge.errors import LayoutError
from wbridge.integrations.naming import checkpoint_name, checkpoint_names, row_major
from wbridge.integrations.shards import part_of, progressions, regions_of, shard_runs, whole_run
from wbridge.layout.region import Region, Strided
from wbridge.layout.source_map import Mapped


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


def test_regions_of_a_box_cover_exactly_the_local_elements():
    shape, tensor_shape = (4, 6, 5), (3, 5)  # experts 2, rows 1..3 of a fused parameter
    mapped = Mapped(
        parameter="p",
        tensor="t",
        region=Region((3, 5), Strided(0, row_major(tensor_shape)), Strided(2 * 30 + 5, (5, 1))),
    )
    part = part_of(mapped, shape, row_major(shape))
    assert (part.lows, part.extents) == ((2, 1, 0), (1, 3, 5))
    full = torch.arange(120).view(shape)
    runs = [
        shard_runs(whole_run(4), num_shards=2, index=1),
        shard_runs(whole_run(6), num_shards=3, index=0, split_factor=2),
        whole_run(5),
    ]
    local = full[indices(runs[0])][:, indices(runs[1])].contiguous()
    seen = {}
    for region in regions_of(part, runs, local.stride()):
        source = torch.arange(15).as_strided(region.extents, region.source.strides, region.source.offset)
        held = local.flatten().as_strided(region.extents, region.target.strides, region.target.offset)
        seen.update(zip(source.flatten().tolist(), held.flatten().tolist(), strict=True))
    wanted = full[2, 1:4].flatten().tolist()
    assert seen == {k: v for k, v in enumerate(wanted) if v in set(local.flatten().tolist())}


def test_a_region_that_is_no_box_is_refused():
    diagonal = Mapped(parameter="p", tensor="t", region=Region((3,), Strided(0, (1,)), Strided(0, (4,))))
    with pytest.raises(LayoutError, match="'t' is not a box of parameter 'p'"):
        part_of(diagonal, (3, 3), (3, 1))


def test_c17_wrapper_prefixes_are_removed_however_nested():
    assert checkpoint_name("module._orig_mod.module.x") == "x"
    assert checkpoint_name("model.layers.0._orig_mod._fsdp_wrapped_module.w") == "model.layers.0.w"
    assert checkpoint_name("decoder.module.weight") == "decoder.module.weight"
    assert checkpoint_name("module") == "module"


def test_c17_a_collision_after_removal_is_named():
    with pytest.raises(LayoutError, match=r"'w' and 'module.w' would both be checkpoint tensor 'w'"):
        checkpoint_names(["w", "module.w"])
