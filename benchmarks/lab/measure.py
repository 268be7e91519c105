"""Runs one system in the lab: its updates, what the kernel has counted, how busy the cores were."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.lab.fleet import TRAINER_HOST, Fleet
from benchmarks.lab.usage import Meter, Usage
from benchmarks.links.hosts import Counters, Host, open_hosts
from benchmarks.systems.cell import Run
from benchmarks.systems.launch import Processes

PORT = 7717
MIN_BURST_NBYTES = 256 * 1024
"""With less, headers cost more: packets are cut smaller before they are limited."""
REST_S = 0.3
"""After an update: what is on its way then, like an acknowledgement, is counted too."""


@dataclass(frozen=True)
class System:
    """One way to bring weights to rollouts: a module of `benchmarks.systems`, and its options."""

    name: str
    module: str
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Update:
    """One update. Times from the first trainer that begins to the last rollout that has all its weights."""

    wall_s: float
    counted: Mapping[str, Counters]
    usage: Usage


@dataclass(frozen=True)
class Result:
    """All updates of a system on a fleet, or why there are none."""

    system: System
    fleet: Fleet
    updates: tuple[Update, ...] = ()
    predicted_s: float | None = None
    """What the simulator says of an update."""
    why_not: str = ""

    @property
    def wall_s(self) -> float:
        return statistics.median(update.wall_s for update in self.updates)

    @property
    def egress_copies(self) -> float:
        """What the trainers' host has sent, in copies of the model: of all updates, the most."""
        sent = max(update.counted[TRAINER_HOST].sent_payload_nbytes for update in self.updates)
        return sent / self.fleet.copy_nbytes

    @property
    def ingress_over_need_max(self) -> float:
        """What a rollout host has received, over what it needs: of all hosts and updates, the most."""
        return max(
            update.counted[host].received_payload_nbytes / nbytes
            for update in self.updates
            for host, nbytes in self.fleet.needs.items()
        )

    @property
    def rollout_egress_copies(self) -> float:
        """What all rollout hosts together have sent, in copies of the model: of all updates, the most."""
        sent = (
            sum(update.counted[host].sent_payload_nbytes for host in self.fleet.needs)
            for update in self.updates
        )
        return max(sent) / self.fleet.copy_nbytes

    @property
    def lab_usage(self) -> float:
        return max(update.usage.lab for update in self.updates)

    @property
    def machine_usage(self) -> float:
        return max(update.usage.machine for update in self.updates)


def measure(system: System, fleet: Fleet, *, mbit: float, num_updates: int) -> Result:
    """Run a system on hosts of its own; every byte is compared after every update.

    Raises:
        WorkerFailed: a worker raised, or weights are not those of their version.
    """
    with open_hosts(fleet.host_names, mbit=mbit, min_burst_nbytes=MIN_BURST_NBYTES) as hosts:
        options = {**system.options, "rendezvous": f"tcp://{hosts[TRAINER_HOST].address}:{PORT}"}
        places = [hosts[name] for name in fleet.host_of_worker]
        launcher = Processes(system.module, fleet.workload, options, places)
        try:
            run = Run(launcher, fleet.workload)
            run.everywhere("setup")
            pids = run.everywhere("pid")
            run.update(1)  # connects and warms up
            updates = [_update(run, version, hosts, pids) for version in range(2, num_updates + 2)]
            run.close()
        finally:
            launcher.stop()
    return Result(system, fleet, tuple(updates))


def _update(run: Run, version: int, hosts: Mapping[str, Host], pids: list[int]) -> Update:
    before: dict[str, Counters] = {}
    after: dict[str, Counters] = {}
    meters: list[Meter] = []
    usages: list[Usage] = []

    def begin() -> None:
        before.update({name: host.count() for name, host in hosts.items()})
        meters.append(Meter(pids))

    def end() -> None:
        usages.append(meters[0].read())
        time.sleep(REST_S)
        after.update({name: host.count() for name, host in hosts.items()})

    timed = run.update(version, before_push=begin, after_pull=end)
    counted = {name: after[name].since(before[name]) for name in hosts}
    return Update(timed["wall_s"], counted, usages[0])
