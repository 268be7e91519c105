"""Real gloo processes: the declared map of every rank equals the full tensors, element for element."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.faults.roles import FORKS
from wbridge.discovery.specs import row_major
from wbridge.errors import ConfigError, LayoutError
from wbridge.integrations.torch_dtensor import identity_map, source_from_module
from wbridge.layout.region import Region, Strided
from wbridge.layout.source_map import Mapped, SourceMap, TensorSpec

pytestmark = pytest.mark.process
NUM_EXPERTS, INNER, HIDDEN = 5, 3, 8


class Block(torch.nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(HIDDEN, rows, bias=True)
        self.down = torch.nn.Linear(rows, HIDDEN, bias=False)
        self.norm = torch.nn.LayerNorm(HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(self.up(x)))


class Model(torch.nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(10, HIDDEN)
        self.blocks = torch.nn.ModuleList(Block(rows) for _ in range(2))
        self.experts = torch.nn.Parameter(torch.randn(NUM_EXPERTS, 2 * INNER, HIDDEN))
        self.scale = torch.nn.Parameter(torch.randn(2))
        self.register_buffer("bias_correction", torch.randn(4))
        self.register_buffer("cache", torch.randn(4), persistent=False)
        self.head = torch.nn.Linear(HIDDEN, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        gate = torch.einsum("bh,eih->bi", x, self.experts)[:, :HIDDEN]
        return self.head(x) + gate.sum() * self.scale.sum()


def build(rows: int) -> tuple[Model, dict[str, torch.Tensor]]:
    torch.manual_seed(rows)
    model = Model(rows)
    full = {name: p.detach().clone() for name, p in model.state_dict().items()}
    return model, full


def per_expert(model: Model, full: dict[str, torch.Tensor]) -> tuple[SourceMap, dict[str, torch.Tensor]]:
    """The map of the unsharded model whose checkpoint keeps gate and up of each expert apart."""
    plain = identity_map({n: t for n, t in full.items() if n != "experts"})
    specs, mapped, tensors = dict(plain.checkpoint), list(plain.mapped), dict(full)
    for expert in range(NUM_EXPERTS):
        for half, kind in enumerate(("gate", "up")):
            name = f"experts.{expert}.{kind}"
            specs[name] = TensorSpec((INNER, HIDDEN), "float32")
            offset = (expert * 2 + half) * INNER * HIDDEN
            region = Region((INNER, HIDDEN), Strided(0, (HIDDEN, 1)), Strided(offset, (HIDDEN, 1)))
            mapped.append(Mapped(parameter="experts", tensor=name, region=region))
            tensors[name] = full["experts"][expert, half * INNER : (half + 1) * INNER].clone()
    fused = row_major(TensorSpec(tuple(full["experts"].shape), "float32"))
    parameters = {**plain.parameters, "experts": fused}
    return SourceMap(checkpoint=specs, parameters=parameters, mapped=tuple(mapped)), tensors


def check(model: torch.nn.Module, full: dict[str, torch.Tensor], whole: SourceMap | None, mesh) -> None:
    """Compare each mapped element of this rank, then count what all ranks hold together."""
    source = source_from_module(model, whole=whole, mesh=mesh)
    assert source.source_map is not None
    covered = {name: torch.zeros(full[name].shape, dtype=torch.int32) for name in source.checkpoint}
    held = dict.fromkeys(source.parameters, 0)
    for entry in source.source_map.mapped:
        region, local = entry.region, source.parameters[entry.parameter]
        base = local.storage_offset()
        live = local.as_strided(region.extents, region.target.strides, base + region.target.offset)
        wanted = full[entry.tensor].as_strided(region.extents, region.source.strides, region.source.offset)
        assert torch.equal(live, wanted), (str(source.worker), entry)
        covered[entry.tensor].as_strided(region.extents, region.source.strides, region.source.offset).add_(1)
        held[entry.parameter] += region.num_elements
    assert held == {name: local.numel() for name, local in source.parameters.items()}
    assert "cache" not in source.checkpoint and "bias_correction" in source.checkpoint
    assert len(source.source_map.mapped) <= 3 * len(source.checkpoint)
    for count in covered.values():
        dist.all_reduce(count)
        assert int(count.min()) >= 1
    workers = [None] * dist.get_world_size()
    dist.all_gather_object(workers, str(source.worker))
    assert len(set(workers)) == dist.get_world_size()


def tensor_parallel(model: Model, mesh) -> None:
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def step(model: torch.nn.Module) -> None:
    model(torch.arange(4)).sum().backward()


def fsdp(rows: int) -> None:
    """c20, c21, c22: uneven and empty shards, an ignored parameter that stays a plain tensor, ties."""
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
    model, full = build(rows)
    whole, tensors = per_expert(model, full)
    ignored = {model.blocks[1].norm.weight}
    for block in model.blocks:
        fully_shard(block, mesh=mesh, ignored_params=ignored)
    fully_shard(model, mesh=mesh, ignored_params=ignored)
    check(model, tensors, whole, None)
    before = copy.copy(source_from_module(model).parameters)
    pointers = {name: t.data_ptr() for name, t in before.items()}
    step(model)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    after = source_from_module(model).parameters
    assert pointers == {name: t.data_ptr() for name, t in after.items()}
    assert torch.equal(after["head.weight"], after["embed.weight"])


def tp(rows: int) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model, full = build(rows)
    tensor_parallel(model, mesh)
    check(model, full, None, None)
    partial = DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)
    model.register_parameter("unreduced", torch.nn.Parameter(partial))
    with pytest.raises(LayoutError, match=r"'unreduced' has placement P.* on mesh dimension 0"):
        source_from_module(model)


def two_d(rows: int) -> None:
    """c21: rows over TP x DP, rank order is not row order."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, full = build(rows)
    tensor_parallel(model, mesh["tp"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    check(model, full, None, mesh)
    rows_only = fully_shard(torch.nn.Linear(4, 4), mesh=mesh["dp"])
    with pytest.raises(ConfigError, match=r"mesh has 2 ranks, the job 4; give the whole mesh"):
        source_from_module(rows_only)


def hsdp(rows: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model, full = build(rows)
    fully_shard(model, mesh=mesh)
    check(model, full, None, None)


def run(rank: int, scenario: str, rows: tuple[int, ...], world: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    for n in rows:
        globals()[scenario](n)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("scenario", "world", "rows"),
    [("fsdp", 3, (10, 2)), ("tp", 2, (10, 5)), ("two_d", 4, (8, 5, 3)), ("hsdp", 4, (6, 5))],
)
def test_c20_c21_c22_declared_shards_equal_the_full_tensors(scenario, world, rows, tmp_path):
    arguments = (scenario, rows, world, str(tmp_path / "store"))
    torch.multiprocessing.start_processes(
        run, args=arguments, nprocs=world, start_method=FORKS.get_start_method()
    )
