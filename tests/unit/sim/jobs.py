"""Small jobs to simulate."""

from __future__ import annotations

import msgspec

from wbridge.config import Config
from wbridge.plan.build import plan_tables
from wbridge.plan.describe import Group, HostLinks, Job
from wbridge.plan.fleets import Model
from wbridge.plan.topology import Topology
from wbridge.plan.types import Plan
from wbridge.sim.simulate import Fold, Outcome, simulate
from wbridge.sim.speeds import Speeds

SMALL = Model(
    name="small", num_layers=4, num_experts=8, hidden=64, expert_hidden=32, num_heads=4, num_kv_heads=2,
    head=16, vocab=512,
)  # fmt: skip
LARGER = msgspec.structs.replace(SMALL, num_layers=16)
CONFIG = Config(slot_nbytes=2**16)
FREE = Speeds(latency_s=0.0, local_latency_s=0.0, message_s=0.0)
"""Nothing but bytes takes time."""


def job(rollouts: tuple[Group, ...], trainers: Group = Group(workers=2, pp=2), **links: object) -> Job:  # noqa: B008  # frozen
    fields = {"gpus_per_host": 2, "nics_per_host": 1, "nic_gb_s": 0.01, **links}
    return msgspec.structs.replace(Job(model="small", trainers=trainers, rollouts=rollouts), **fields)


def planned(described: Job, config: Config = CONFIG, model: Model = SMALL) -> tuple[Plan, Topology]:
    fleet = described.fleet(model)
    topology = described.topology(set(fleet.hosts.values()))
    return plan_tables(fleet.tables, fleet.hosts, config, topology), topology


def simulated(
    described: Job, speeds: Speeds = FREE, config: Config = CONFIG, *, fold: Fold = "engines"
) -> Outcome:
    plan, topology = planned(described, config)
    return simulate(plan, config, topology, speeds, fold=fold)


def slow(host: str, gb_s: float) -> tuple[HostLinks, ...]:
    return (HostLinks(hosts=host, nics=1, gb_s=gb_s),)
