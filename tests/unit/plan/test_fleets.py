from __future__ import annotations

import math

import pytest

from wbridge.config import Config
from wbridge.errors import ConfigError, PlanError
from wbridge.ids import WorkerId
from wbridge.plan.bound import lower_bound
from wbridge.plan.build import plan_tables
from wbridge.plan.fleets import MODELS, Model, Parallelism, Part, build_fleet, tensors_of
from wbridge.plan.geometry import Geometry
from wbridge.plan.topology import Nic, Topology, find_links

SMALL = Model(
    name="small", num_layers=2, num_experts=8, hidden=64, expert_hidden=32, num_heads=4, num_kv_heads=2,
    head=16, vocab=128,
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "billions", "num_tensors"),
    [("Qwen3-30B-A3B", 30.5, 18_867), ("Kimi-K2", 1026.4, None), ("Moonlight-16B-A3B", 16.0, None)],
)
def test_models_have_their_published_size(name: str, billions: float, num_tensors: int | None) -> None:
    sizes = [math.prod(tensor.shape) for tensor in tensors_of(MODELS[name])]
    assert sum(sizes) / 1e9 == pytest.approx(billions, abs=0.05)
    assert num_tensors in (None, len(sizes))


@pytest.mark.parametrize(
    "mesh",
    [
        Parallelism(fsdp=4),
        Parallelism(pp=2, tp=2),
        Parallelism(tp=4, ep=4),
        Parallelism(tp=8),  # more ranks than key-value heads: they are kept twice
    ],
)
def test_a_fleet_can_be_planned_and_holds_the_whole_model(mesh: Parallelism) -> None:
    part = Part(workers_per_group=8, parallelism=mesh)
    engine = Part(workers_per_group=4, num_groups=2, parallelism=Parallelism(tp=4, ep=2, fused=True))
    fleet = build_fleet(SMALL, part, (engine,))
    assert len(set(fleet.hosts.values())) == 2
    plan = plan_tables(fleet.tables, fleet.hosts, Config())
    links = find_links(plan.workers, plan.hosts, Topology())
    copy_nbytes, _ = lower_bound(plan, links, Geometry())
    assert copy_nbytes == 2 * sum(math.prod(tensor.shape) for tensor in tensors_of(SMALL))


def test_equal_workers_have_one_table() -> None:
    engine = Part(workers_per_group=2, num_groups=3, parallelism=Parallelism(tp=2))
    fleet = build_fleet(SMALL, Part(workers_per_group=4, parallelism=Parallelism(tp=2)), (engine,))
    assert len({id(table) for table in fleet.tables.values()}) == 2


def test_a_group_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match="6 workers do not divide"):
        build_fleet(SMALL, Part(workers_per_group=6, parallelism=Parallelism(tp=4)), ())


def test_links_divide_the_workers_of_a_host_among_its_nics() -> None:
    workers = tuple(WorkerId("rollout", "e", (4,), (k,)) for k in range(4))
    fast, slow = Nic(50.0, 40.0), Nic(5.0, 4.0)
    links = find_links(workers, ("a",) * 4, Topology({"a": (fast, slow)}))
    assert (links.names, links.nics, links.of_worker) == (("a/nic0", "a/nic1"), (fast, slow), (0, 0, 1, 1))
    assert find_links(workers, ("a",) * 4, Topology()).of_worker == (0, 0, 0, 0)
    with pytest.raises(PlanError, match="host 'a' has no NIC"):
        find_links(workers, ("a",) * 4, Topology({"a": ()}))
    with pytest.raises(PlanError, match="a bandwidth must be positive"):
        Nic(0.0, 1.0)
