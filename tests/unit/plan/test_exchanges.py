"""Which rollouts pass on what they get, and what that costs the links."""

from __future__ import annotations

import pytest

from wbridge.config import Config
from wbridge.errors import ConfigError, PlanError
from wbridge.plan.build import plan_tables
from wbridge.plan.explain import Explanation, explain
from wbridge.plan.fleets import MODELS, Parallelism, Part, build_fleet
from wbridge.plan.topology import Nic, Topology, read_topology
from wbridge.plan.types import Plan

TRAINERS = Part(workers_per_group=16, parallelism=Parallelism(pp=2, tp=4, ep=8))


def engines(num: int, tp: int) -> Part:
    return Part(workers_per_group=8, num_groups=num, parallelism=Parallelism(tp=tp, ep=8, fused=True))


SHARDED = Part(workers_per_group=8, num_groups=2, parallelism=Parallelism(tp=8, fused=True))
STAGED = Part(workers_per_group=8, num_groups=2, parallelism=Parallelism(pp=2, tp=4, ep=4, fused=True))


def planned(*rollouts: Part, **bandwidths: float) -> tuple[Plan, Explanation]:
    """A plan with one NIC for each GPU of 50 GB/s, or as much as its host's name in `bandwidths` says."""
    fleet = build_fleet(MODELS["Qwen3-30B-A3B"], TRAINERS, rollouts)
    topology = Topology(
        {
            host: (Nic(*[bandwidths.get(host.replace("-", "_"), 50.0)] * 2),) * 8
            for host in fleet.hosts.values()
        }
    )
    plan = plan_tables(fleet.tables, fleet.hosts, Config(), topology)
    return plan, explain(plan, Config(), topology)


@pytest.mark.parametrize("num", [1, 2, 3, 4])
def test_one_copy_is_sent_and_every_host_gets_one(num: int) -> None:
    """Ranks of engines pass on to the same ranks of others what is theirs; two have each head of keys, and
    all have the norms."""
    plan, told = planned(engines(num, 8))
    assert {len(exchange.members) for exchange in plan.exchanges} == {num, 2 * num, 8 * num} - {1}
    assert told.copies_sent == 1.0
    assert set(told.ingress_nbytes.values()) == {told.model_nbytes}
    assert told.ratio <= 1.02
    assert told.relayed_nbytes + told.sent_nbytes == told.needed_nbytes


def test_each_exchange_begins_at_another_entry() -> None:
    plan, _ = planned(engines(2, 8))
    first = [exchange.members[exchange.entries.index(max(exchange.entries))] for exchange in plan.exchanges]
    assert len(first) == len(set(first)) == 13  # each rank, four pairs with the same head of keys, and all


def test_entries_follow_the_bandwidth_of_their_host() -> None:
    plan, told = planned(engines(3, 8), rollout_host001=25.0)
    for exchange in plan.exchanges:
        by_host = [sum(exchange.entries[k::3]) for k in range(3)]
        if len(exchange.members) == 3:
            assert by_host[1] < min(by_host[0], by_host[2])
            assert abs(by_host[0] - by_host[2]) <= 1  # who has the first turn has a little more
    assert told.copies_sent == 1.0


@pytest.mark.parametrize(
    "others", [engines(2, 4), engines(2, 2), SHARDED, STAGED], ids=["tp4", "tp2", "ep", "pp"]
)
def test_engines_of_unequal_layouts_take_one_copy_together(others: Part) -> None:
    plan, told = planned(engines(2, 8), others)
    assert any(len(exchange.tables) > 1 for exchange in plan.exchanges)
    assert told.copies_sent == 1.0
    assert all(nbytes <= told.model_nbytes for nbytes in told.ingress_nbytes.values())
    assert told.ratio <= 1.10


def test_topology_is_read_from_settings() -> None:
    found = read_topology(("node1=25+12.5", "node2=50/25"))
    assert found.nics == {"node1": (Nic(25.0, 25.0), Nic(12.5, 12.5)), "node2": (Nic(50.0, 25.0),)}


@pytest.mark.parametrize("entry", ["node1", "node1=", "=5", "node1=5/", "node1=5+", "node1=5 GB/s"])
def test_settings_name_an_entry_that_says_nothing(entry: str) -> None:
    with pytest.raises(ConfigError, match="write HOST=EGRESS/INGRESS in GB/s"):
        Config(topology=(entry,))


@pytest.mark.parametrize("entry", ["node1=0", "node1=1..5"])
def test_a_bandwidth_that_is_none_is_refused(entry: str) -> None:
    with pytest.raises(PlanError, match=r"bandwidth must be positive|give GB/s such as 12\.5"):
        read_topology((entry,))
