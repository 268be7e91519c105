"""What the simulator says of a fleet, from the speeds of one link."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import torch

from benchmarks.lab.fleet import Fleet
from benchmarks.systems.ours import config_of, describe
from benchmarks.systems.worker import Context
from wbridge.cli.measure import LinkSpeed
from wbridge.config import Config
from wbridge.discovery.discover import discover
from wbridge.ids import WorkerId
from wbridge.layout.source_map import SourceMap
from wbridge.plan.build import build_plan
from wbridge.plan.topology import Nic, Topology
from wbridge.sim.simulate import simulate
from wbridge.sim.speeds import Speeds


def predict(fleet: Fleet, options: Mapping[str, str], link: LinkSpeed) -> float:
    """The seconds of an update by this package, with its plan and its protocol, on links like this one."""
    config = msgspec.convert({**config_of(fleet.workload, options), "verify": "off"}, Config)
    maps = _maps(fleet, config)
    hosts = dict(zip(maps, fleet.host_of_worker, strict=True))
    nic = Nic(egress_gb_s=link.link_gb_s, ingress_gb_s=link.link_gb_s)
    topology = Topology(dict.fromkeys(fleet.host_names, (nic,)))
    plan = build_plan(maps, hosts, config, topology)
    # Half a round is the way of a message; what it costs its ends is part of that.
    return simulate(plan, config, topology, Speeds(latency_s=link.round_s / 2, message_s=0.0)).time_s


def _maps(fleet: Fleet, config: Config) -> dict[WorkerId, SourceMap]:
    """The source map of each worker, trainers first; of equal workers one is looked at."""
    job, found = fleet.workload.job, {}
    known: dict[tuple[str, int], SourceMap] = {}
    places = [("trainer", rank) for rank in range(job.num_trainers)]
    for role, rank in [*places, *(("rollout", rank) for rank in range(job.num_rollouts))]:
        parameters = {
            name: torch.empty(shape, dtype=torch.bfloat16)
            for name, shape in fleet.workload.shapes(role).items()
        }
        described = describe(Context(fleet.workload, role, rank, {}, list, parameters=parameters))
        key = role, rank % (job.trainer_parallel if role == "trainer" else job.rollout_parallel)
        if key not in known:
            assert described.load_weights is not None
            known[key] = discover(
                checkpoint=described.checkpoint,
                parameters=parameters,
                load_weights=described.load_weights,
                config=config,
            )
        found[described.worker] = known[key]
    return found
