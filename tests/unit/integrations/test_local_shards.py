"""The local part of a sharded parameter stays what it is while FSDP shows the whole one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from wbridge.integrations.torch_dtensor import source_from_module


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_a_shard_is_found_while_the_whole_parameter_stands_in_for_it(alone: None) -> None:
    model = torch.nn.Linear(4, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    shards = source_from_module(model).parameters
    before = shards["weight"]
    with torch.no_grad():
        model(torch.zeros(1, 4))
    assert not hasattr(model.weight, "placements")  # whole, until a backward pass
    assert shards["weight"].data_ptr() == before.data_ptr() != model.weight.data_ptr()
    model.reshard()
    model._apply(torch.clone)
    assert shards["weight"].data_ptr() == model.weight.to_local().data_ptr() != before.data_ptr()
