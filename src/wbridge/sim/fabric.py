"""Fabric: which links the bytes between two workers pass, and how long a message takes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from wbridge.plan.topology import Topology, find_links
from wbridge.plan.types import Plan
from wbridge.sim.fairness import Hops
from wbridge.sim.speeds import Speeds


class LinkBytes(msgspec.Struct, frozen=True):
    """What one direction of a link has carried."""

    link: str
    direction: str
    nbytes: int


class Fabric:
    """Between hosts, a flow passes the NIC of its writer and that of its receiver; inside one, the two
    workers' own access to memory or to a switch.

    `copies[k]`: workers equal to receiver `k`, itself included, that it stands for.
    """

    def __init__(
        self, plan: Plan, topology: Topology, speeds: Speeds, copies: Sequence[Sequence[int]]
    ) -> None:
        self._hosts, self._speeds, self._copies = plan.hosts, speeds, copies
        self._links = find_links(plan.workers, plan.hosts, topology)
        scale = 1e9 * speeds.efficiency
        self._num_nics = len(self._links.nics)
        self.capacities: list[float] = []
        """Bytes per second: of each NIC egress and ingress, then of each worker the same inside its host."""
        for nic in self._links.nics:
            self.capacities += [nic.egress_gb_s * scale, nic.ingress_gb_s * scale]
        self.capacities += [speeds.local_gb_s * 1e9] * (2 * len(plan.workers))

    def keep_share(self, link: int, share: float) -> None:
        """Leave only a share of the egress of a NIC: the rest is for those that are not simulated."""
        self.capacities[2 * link] *= share

    def num_copies(self, worker: int) -> int:
        return len(self._copies[worker])

    def hops(self, writer: int, receiver: int) -> Hops:
        """Return what a flow passes that stands for one to each copy of the receiver."""
        copies = self._copies[receiver]
        if self._hosts[writer] == self._hosts[receiver]:
            first = 2 * self._num_nics
            return (first + 2 * writer, len(copies)), (first + 2 * receiver + 1, 1)
        link_of = self._links.of_worker
        at_once = sum(link_of[copy] == link_of[receiver] for copy in copies)
        return (2 * link_of[writer], len(copies)), (2 * link_of[receiver] + 1, at_once)

    def is_local(self, one: int, other: int) -> bool:
        return self._hosts[one] == self._hosts[other]

    def latency_s(self, one: int, other: int) -> float:
        if one == other:
            return 0.0
        return self._speeds.local_latency_s if self.is_local(one, other) else self._speeds.latency_s

    def report(self, carried: Sequence[float]) -> tuple[LinkBytes, ...]:
        """Return what the NICs have carried, those of one worker that stands for others once."""
        return tuple(
            LinkBytes(name, direction, round(carried[2 * number + turn]))
            for number, name in enumerate(self._links.names)
            for turn, direction in enumerate(("egress", "ingress"))
        )
