"""bound: the least time that any plan needs, whoever sends what over which links."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from wbridge.layout.dtype import itemsize
from wbridge.layout.region import Region
from wbridge.plan.classes import needed_region
from wbridge.plan.geometry import Geometry, at_origin, region_key
from wbridge.plan.topology import Links
from wbridge.plan.types import Place, Plan, PlannedClass


class Bound(msgspec.Struct, frozen=True):
    """The least seconds on the busiest link, and the reasons for it; bytes inside a host count like others.

    The first four hold if rollouts pass on what they have, so that trainers send one copy and a host
    receives each element once. The last two hold if trainers serve every rollout themselves.
    """

    shared_egress_s: float
    """One copy of what is needed, over the egress of all trainers."""
    sole_holder_s: float
    """What nobody but the trainers of one link holds, over its egress: the largest."""
    host_ingress_s: float
    """What a rollout host needs, each element once, over its ingress: the largest."""
    relay_egress_s: float
    """What rollout hosts receive beyond one copy, over the egress of them all."""
    direct_egress_s: float
    """What all rollouts need, over the egress of all trainers."""
    direct_ingress_s: float
    """What the rollouts of one link need, all workers counted, over its ingress: the largest."""

    @property
    def relayed_s(self) -> float:
        return max(self.shared_egress_s, self.sole_holder_s, self.host_ingress_s, self.relay_egress_s)

    @property
    def direct_s(self) -> float:
        return max(self.relayed_s, self.direct_egress_s, self.direct_ingress_s)


class Part(msgspec.Struct, frozen=True):
    """Bytes of checkpoint elements that the same workers hold and need, in their narrowest wire dtype."""

    nbytes: int
    owners: tuple[int, ...]
    receivers: tuple[int, ...]


def iter_parts(plan: Plan, geometry: Geometry) -> Iterator[Part]:
    """Yield what is needed, each checkpoint element once whatever the dtypes in which it travels."""
    members: list[list[int]] = [[] for _ in plan.tables]
    for index, table in enumerate(plan.table_of):
        members[table].append(index)
    receivers: dict[tuple[Place, ...], tuple[int, ...]] = {}
    for planned in plan.classes:
        for region, owners, needed, dtype in _disjoint(plan, planned, geometry):
            if needed not in receivers:
                tables = sorted({table for table, _ in needed})
                receivers[needed] = tuple(
                    k for table in tables for k in members[table] if plan.workers[k].role == "rollout"
                )
            nbytes = planned.num_tensors * region.num_elements * itemsize(dtype)
            yield Part(nbytes, owners, receivers[needed])


_Disjoint = tuple[Region, tuple[int, ...], tuple[Place, ...], str]


def _disjoint(plan: Plan, planned: PlannedClass, geometry: Geometry) -> Iterator[_Disjoint]:
    if len({cell.wire_dtype for cell in planned.cells}) <= 1:
        for cell in planned.cells:
            yield cell.region, cell.owners, cell.needed, cell.wire_dtype
        return
    dtype = min((cell.wire_dtype for cell in planned.cells), key=itemsize)
    by_region: dict[Region, list[Place]] = {}
    for place in sorted({place for cell in planned.cells for place in cell.needed}):
        by_region.setdefault(at_origin(needed_region(plan.row(place).region)), []).append(place)
    regions = tuple(sorted({cell.region for cell in planned.cells}, key=region_key))
    owners = {cell.region: cell.owners for cell in planned.cells}
    for shared in geometry.shared(regions, tuple(by_region)):
        places = tuple(place for k in shared.needed for place in list(by_region.values())[k])
        yield shared.region, owners[regions[shared.held[0]]], places, dtype


def lower_bound(plan: Plan, links: Links, geometry: Geometry) -> tuple[int, Bound]:
    """Return the bytes of one copy of what is needed, and the bound."""
    trainers = {links.of_worker[k] for k, worker in enumerate(plan.workers) if worker.role == "trainer"}
    rollouts = {links.of_worker[k]: plan.hosts[k] for k, w in enumerate(plan.workers) if w.role == "rollout"}
    nics = links.nics
    copy = sent = 0
    sole: dict[int, int] = {}
    by_host: dict[str, int] = {}
    by_link: dict[int, int] = {}
    hosts_of: dict[tuple[int, ...], set[str]] = {}
    for part in iter_parts(plan, geometry):
        copy += part.nbytes
        sent += part.nbytes * len(part.receivers)
        held_by = {links.of_worker[k] for k in part.owners}
        if len(held_by) == 1:
            (link,) = held_by
            sole[link] = sole.get(link, 0) + part.nbytes
        if part.receivers not in hosts_of:
            hosts_of[part.receivers] = {plan.hosts[k] for k in part.receivers}
        for host in hosts_of[part.receivers]:
            by_host[host] = by_host.get(host, 0) + part.nbytes
        for k in part.receivers:
            by_link[links.of_worker[k]] = by_link.get(links.of_worker[k], 0) + part.nbytes
    egress = sum(nics[link].egress_gb_s for link in trainers)
    ingress: dict[str, float] = {}
    for link, host in rollouts.items():
        ingress[host] = ingress.get(host, 0.0) + nics[link].ingress_gb_s
    relay = sum(nics[link].egress_gb_s for link in rollouts)
    return copy, Bound(
        shared_egress_s=_seconds(copy, egress),
        sole_holder_s=max((_seconds(n, nics[link].egress_gb_s) for link, n in sole.items()), default=0.0),
        host_ingress_s=max((_seconds(n, ingress[host]) for host, n in by_host.items()), default=0.0),
        relay_egress_s=_seconds(sum(by_host.values()) - copy, relay),
        direct_egress_s=_seconds(sent, egress),
        direct_ingress_s=max(
            (_seconds(n, nics[link].ingress_gb_s) for link, n in by_link.items()), default=0.0
        ),
    )


def _seconds(nbytes: int, gb_s: float) -> float:
    return nbytes / (gb_s * 1e9)
