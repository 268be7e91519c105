"""baselines: what one would do without a plan, over the same links, under assumptions in its favour."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from functools import partial

import msgspec

from wbridge.plan.bound import iter_parts
from wbridge.plan.geometry import Geometry
from wbridge.plan.topology import Topology
from wbridge.plan.types import Plan
from wbridge.sim.fabric import Fabric
from wbridge.sim.fairness import Hops
from wbridge.sim.network import Network
from wbridge.sim.speeds import Speeds
from wbridge.sim.timeline import Timeline


class Baseline(msgspec.Struct, frozen=True):
    """One version, by other means."""

    name: str
    assumes: str
    time_s: float
    agst_s: float
    """Stall averaged over all workers."""


def broadcast(plan: Plan, topology: Topology, speeds: Speeds) -> Baseline:
    """Trainers that divide tensors gather these at one of them, which broadcasts to all rollouts."""
    fabric, timeline, network = _built(plan, topology, speeds)
    parts = list(iter_parts(plan, Geometry()))
    stage_of = _stages(plan)
    gathered: dict[int, dict[int, int]] = {}  # stage -> trainer -> bytes that it alone brings
    for part in parts:
        stage, holder = stage_of[part.owners[0]], part.owners[0]
        if stage in part.owners:
            holder = stage
        own = gathered.setdefault(stage, {})
        own[holder] = own.get(holder, 0) + part.nbytes
    ended = 0.0

    def over() -> None:
        nonlocal ended
        ended = timeline.now

    for number, (stage, brought) in enumerate(sorted(gathered.items())):
        chain = _chain(plan, fabric, stage, number)
        send = partial(network.send, chain, sum(brought.values()), over)
        waiting = {trainer for trainer in brought if trainer != stage}

        def arrived(trainer: int, waiting: set[int] = waiting, send: partial[None] = send) -> None:
            waiting.discard(trainer)
            if not waiting:
                send()

        for trainer in sorted(waiting):
            network.send(fabric.hops(trainer, stage), brought[trainer], partial(arrived, trainer))
        if not waiting:
            send()
    timeline.run(lambda: False)
    assumes = (
        f"{len(gathered)} sources at once, one for each part of the layers; each gathers all it sends, then"
        " broadcasts it along one chain of all rollouts; no cost per tensor or message; all stall meanwhile"
    )
    return Baseline("broadcast", assumes, ended, ended)


def independent_fetch(plan: Plan, topology: Topology, speeds: Speeds) -> Baseline:
    """Each rollout gets all it needs from the first trainer that holds it, whoever else does the same."""
    fabric, timeline, network = _built(plan, topology, speeds)
    pairs: dict[tuple[int, int], int] = {}
    for part in iter_parts(plan, Geometry()):
        for receiver in part.receivers:
            pair = part.owners[0], receiver
            pairs[pair] = pairs.get(pair, 0) + part.nbytes
    ends = dict.fromkeys(range(len(plan.workers)), 0.0)

    def over(pair: tuple[int, int]) -> None:
        for k in pair:
            ends[k] = timeline.now

    for pair, nbytes in sorted(pairs.items()):
        network.send(fabric.hops(*pair), nbytes, partial(over, pair))
    timeline.run(lambda: False)
    assumes = (
        "of several holders the first serves everybody; all fetches run at once; no cost per tensor or"
        " message; a worker stalls until its own last byte"
    )
    return Baseline("independent fetch", assumes, max(ends.values()), statistics.fmean(ends.values()))


def _built(plan: Plan, topology: Topology, speeds: Speeds) -> tuple[Fabric, Timeline, Network]:
    fabric = Fabric(plan, topology, speeds, [(k,) for k in range(len(plan.workers))])
    timeline = Timeline()
    return fabric, timeline, Network(timeline, fabric.capacities)


def _stages(plan: Plan) -> Mapping[int, int]:
    """Return for each trainer the first of those with which it shares a class of tensors, directly or not."""
    first = {k: k for k, worker in enumerate(plan.workers) if worker.role == "trainer"}

    def find(k: int) -> int:
        while first[k] != k:
            k = first[k]
        return k

    members: dict[int, list[int]] = {}
    for k in first:
        members.setdefault(plan.table_of[k], []).append(k)
    for planned in plan.classes:
        tables = {place[0] for cell in planned.cells for place in cell.held}
        together = sorted(k for table in tables for k in members[table])
        for k in together[1:]:
            one, other = sorted((find(together[0]), find(k)))
            first[other] = one
    return {k: find(k) for k in first}


def _chain(plan: Plan, fabric: Fabric, source: int, number: int) -> Hops:
    """Return what a broadcast loads: the source's NIC, one NIC of each rollout host in and out, and inside a
    host every worker's access. `number`: different sources enter hosts by different workers."""
    by_host: dict[str, list[int]] = {}
    for k, worker in enumerate(plan.workers):
        if worker.role == "rollout":
            by_host.setdefault(plan.hosts[k], []).append(k)
    found: dict[int, int] = {}
    last = source
    for _, own in sorted(by_host.items()):
        turned = own[number % len(own) :] + own[: number % len(own)]
        for k in turned:
            for link, times in fabric.hops(last, k):
                found[link] = found.get(link, 0) + times
            last = k
    return tuple(sorted(found.items()))
