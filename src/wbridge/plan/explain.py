"""explain: what a plan costs, next to the least that any plan would cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from wbridge.config import Config
from wbridge.ids import WorkerId
from wbridge.layout.dtype import itemsize, wire_dtype
from wbridge.layout.region import Region
from wbridge.layout.source_map import SourceMap
from wbridge.plan.checks import wire_elements
from wbridge.plan.demand import Demand, find_demand
from wbridge.plan.geometry import Geometry
from wbridge.plan.schedule import ring_slots
from wbridge.plan.types import Group, Plan


class Link(msgspec.Struct, frozen=True):
    """Bytes that one trainer sends to one rollout worker in each version."""

    writer: str
    receiver: str
    nbytes: int
    crosses_hosts: bool


class Cast(msgspec.Struct, frozen=True):
    """Wire bytes of all transfers between one pair of different dtypes."""

    source: str
    target: str
    wire: str
    nbytes: int


class SlotMemory(msgspec.Struct, frozen=True):
    """What one worker keeps for slots: a ring for a rollout, gather slots and snapshots for a trainer.

    Which of the two stagings applies follows from the mode.
    """

    worker: str
    num_groups: int
    slot_nbytes: int
    """The largest group that passes through a slot."""
    direct_slots: int
    direct_nbytes: int
    """Device memory with direct staging. Of a trainer, in every mode: host memory to gather in, for each
    receiver on another host; none is needed for those on its own."""
    pinned_slots: int
    pinned_nbytes: int
    """Host memory with pinned staging: a ring, or the trainer's snapshots."""
    version_nbytes: int
    """What passes through the slots in each version."""
    pinned_share: float
    """The part of a version for which there is room while the worker computes, with pinned staging."""
    lost_overlap_nbytes: int
    """With pinned staging: bytes that can only move while the engine is parked, since its ring is full."""


class LowerBound(msgspec.Struct, frozen=True):
    """The least bytes on the busiest of links with equal bandwidth, and the four reasons for it.

    A link is a trainer's egress or a rollout host's ingress; those inside a host count like the others.
    """

    shared_egress_nbytes: int
    """One copy of what is needed, divided among all trainers."""
    sole_holder_nbytes: int
    """What the trainer that is the only holder of most must send."""
    host_ingress_nbytes: int
    """What the rollout host with the largest need must receive."""
    relay_egress_nbytes: int
    """What rollout hosts must pass on to each other when trainers send one copy."""

    @property
    def nbytes(self) -> int:
        return max(
            self.shared_egress_nbytes,
            self.sole_holder_nbytes,
            self.host_ingress_nbytes,
            self.relay_egress_nbytes,
        )


class Explanation(msgspec.Struct, frozen=True):
    """Bytes per link, memory per worker, and the distance to the lower bound; encode it with msgspec."""

    fingerprint: str
    num_tensors: int
    num_unused_tensors: int
    """Tensors that trainers hold and no rollout needs."""
    num_transfers: int
    egress_nbytes: dict[str, int]
    """By trainer."""
    ingress_nbytes: dict[str, int]
    """By rollout host."""
    links: tuple[Link, ...]
    casts: tuple[Cast, ...]
    memory: tuple[SlotMemory, ...]
    needed_nbytes: int
    """What all rollout workers need together, without repeated elements inside a parameter."""
    model_nbytes: int
    """Distinct checkpoint elements that any rollout needs: one copy."""
    sent_nbytes: int
    copies_sent: float
    busiest_nbytes: int
    bound: LowerBound
    bound_nbytes: int
    ratio: float
    """Bytes on the busiest link over the lower bound."""

    def to_text(self) -> str:
        """Return the explanation as lines for a terminal."""
        lines = [
            f"plan {self.fingerprint[:12]}: {self.num_tensors} tensors in {self.num_transfers} transfers,"
            f" {self.num_unused_tensors} tensors of the trainers are not needed",
            f"needed {_size(self.needed_nbytes)}, sent {_size(self.sent_nbytes)},"
            f" {self.copies_sent:.2f} copies of {_size(self.model_nbytes)}",
            f"busiest link {_size(self.busiest_nbytes)}, lower bound {_size(self.bound_nbytes)},"
            f" ratio {self.ratio:.2f}",
        ]
        lines += [f"egress   {name:<32} {_size(n):>12}" for name, n in self.egress_nbytes.items()]
        lines += [f"ingress  {name:<32} {_size(n):>12}" for name, n in self.ingress_nbytes.items()]
        for link in self.links:
            where = "between hosts" if link.crosses_hosts else "inside a host"
            lines.append(f"link     {link.writer} -> {link.receiver}: {_size(link.nbytes)} {where}")
        for cast in self.casts:
            lines.append(f"cast     {cast.source} -> {cast.target} as {cast.wire}: {_size(cast.nbytes)}")
        for use in self.memory:
            lines.append(
                f"memory   {use.worker:<32} {use.num_groups} groups of up to {_size(use.slot_nbytes)}:"
                f" direct {_size(use.direct_nbytes)} in {use.direct_slots} slots,"
                f" pinned {_size(use.pinned_nbytes)} in {use.pinned_slots}"
            )
            if use.lost_overlap_nbytes:
                lines.append(
                    f"overlap  {use.worker:<32} pinned slots take {use.pinned_share:.0%} of"
                    f" {_size(use.version_nbytes)}; the other {_size(use.lost_overlap_nbytes)} move only"
                    " while the engine is parked"
                )
        return "\n".join(lines)


def explain(
    plan: Plan, maps: Mapping[WorkerId, SourceMap], hosts: Mapping[WorkerId, str], config: Config
) -> Explanation:
    """Measure `plan`, which `build_plan` made from the same arguments."""
    demand, geometry = find_demand(maps, config), Geometry()
    traffic = _Traffic(plan, maps)
    trainers = [worker for worker in plan.workers if worker.role == "trainer"]
    egress = {
        str(worker): sum(n for (writer, _), n in traffic.links.items() if writer == worker)
        for worker in trainers
    }
    ingress = {hosts[worker]: 0 for worker in sorted(plan.workers) if worker.role == "rollout"}
    for (_, receiver), nbytes in traffic.links.items():
        ingress[hosts[receiver]] += nbytes
    model_nbytes, bound = _lower_bound(demand, hosts, len(trainers), geometry)
    busiest = max((*egress.values(), *ingress.values()))
    sent = sum(egress.values())
    return Explanation(
        fingerprint=plan.fingerprint,
        num_tensors=len(demand.supplies),
        num_unused_tensors=len(demand.unused),
        num_transfers=traffic.num_transfers,
        egress_nbytes=egress,
        ingress_nbytes=ingress,
        links=tuple(
            Link(str(writer), str(receiver), nbytes, crosses_hosts=hosts[writer] != hosts[receiver])
            for (writer, receiver), nbytes in sorted(traffic.links.items())
        ),
        casts=tuple(Cast(*pair, nbytes) for pair, nbytes in sorted(traffic.casts.items())),
        memory=tuple(_memory(worker, plan, maps[worker], demand, hosts, config) for worker in plan.workers),
        needed_nbytes=sum(
            need.region.num_elements * itemsize(wire_dtype(demand.supplies[need.tensor].dtype, need.dtype))
            for need in demand.needs
        ),
        model_nbytes=model_nbytes,
        sent_nbytes=sent,
        copies_sent=sent / model_nbytes if model_nbytes else 0.0,
        busiest_nbytes=busiest,
        bound=bound,
        bound_nbytes=bound.nbytes,
        ratio=busiest / bound.nbytes if bound.nbytes else 1.0,
    )


class _Traffic:
    """Bytes of a plan by link and by cast."""

    def __init__(self, plan: Plan, maps: Mapping[WorkerId, SourceMap]) -> None:
        self.links: dict[tuple[WorkerId, WorkerId], int] = {}
        self.casts: dict[tuple[str, str, str], int] = {}
        self.num_transfers = 0
        for group in plan.groups:
            targets = maps[group.receiver].parameters
            for piece in group.pieces:
                link = (piece.writer, group.receiver)
                self.links[link] = self.links.get(link, 0) + piece.nbytes
                self.num_transfers += len(piece.transfers)
                sources = maps[piece.writer].parameters
                for transfer in piece.transfers:
                    source = sources[transfer.source_parameter].dtype
                    target = targets[transfer.target_parameter].dtype
                    if source != target:
                        pair = (source, target, transfer.wire_dtype)
                        nbytes = wire_elements(transfer) * itemsize(transfer.wire_dtype)
                        self.casts[pair] = self.casts.get(pair, 0) + nbytes


def _memory(
    worker: WorkerId,
    plan: Plan,
    source_map: SourceMap,
    demand: Demand,
    hosts: Mapping[WorkerId, str],
    config: Config,
) -> SlotMemory:
    lost_nbytes = 0
    if worker.role == "rollout":
        groups = plan.groups_into(worker)
        slot_nbytes = max((group.nbytes for group in groups), default=0)
        direct_slots = ring_slots(config, len(groups), "direct")
        direct_nbytes = direct_slots * slot_nbytes
        pinned_slots = ring_slots(config, len(groups), "pinned")
        pinned_nbytes = pinned_slots * slot_nbytes
        version_nbytes = sum(group.nbytes for group in groups)
        lost_nbytes = sum(group.nbytes for group in groups[pinned_slots:])
    else:
        groups = plan.groups_from(worker)
        version_nbytes = sum(p.nbytes for g in groups for p in g.pieces if p.writer == worker)
        slot_nbytes = max((p.nbytes for g in groups for p in g.pieces if p.writer == worker), default=0)
        largest = _largest_pieces(worker, groups, hosts)
        direct_slots = config.local_slots * len(largest)
        direct_nbytes = config.local_slots * sum(largest.values())
        pinned_slots = config.snapshot_versions
        pinned_nbytes = pinned_slots * sum(
            mapped.region.num_elements * itemsize(source_map.parameters[mapped.parameter].dtype)
            for mapped in source_map.mapped
            if mapped.tensor in demand.supplies
        )
    return SlotMemory(
        worker=str(worker),
        num_groups=len(groups),
        slot_nbytes=slot_nbytes,
        direct_slots=direct_slots,
        direct_nbytes=direct_nbytes,
        pinned_slots=pinned_slots,
        pinned_nbytes=pinned_nbytes,
        version_nbytes=version_nbytes,
        pinned_share=1 - lost_nbytes / version_nbytes if version_nbytes else 1.0,
        lost_overlap_nbytes=lost_nbytes,
    )


def _largest_pieces(
    writer: WorkerId, groups: Iterable[Group], hosts: Mapping[WorkerId, str]
) -> dict[WorkerId, int]:
    """Return the largest piece for each receiver into whose memory the writer cannot gather."""
    largest: dict[WorkerId, int] = {}
    for group in groups:
        if hosts[group.receiver] != hosts[writer]:
            nbytes = max(piece.nbytes for piece in group.pieces if piece.writer == writer)
            largest[group.receiver] = max(largest.get(group.receiver, 0), nbytes)
    return largest


def _lower_bound(
    demand: Demand, hosts: Mapping[WorkerId, str], num_trainers: int, geometry: Geometry
) -> tuple[int, LowerBound]:
    """Return the bytes of one copy and the bound; elements count in the narrowest dtype they travel in."""
    regions: dict[str, dict[str, list[Region]]] = {}
    width: dict[str, int] = {}
    for need in demand.needs:
        regions.setdefault(need.tensor, {}).setdefault(hosts[need.receiver], []).append(need.region)
        wire = itemsize(wire_dtype(demand.supplies[need.tensor].dtype, need.dtype))
        width[need.tensor] = min(wire, width.get(need.tensor, wire))
    model_nbytes = 0
    by_host: dict[str, int] = {}
    by_sole_holder: dict[WorkerId, int] = {}
    for tensor, wanted in regions.items():
        for host, own in wanted.items():
            by_host[host] = by_host.get(host, 0) + width[tensor] * _count(geometry.union(own))
        distinct = geometry.union(region for own in wanted.values() for region in own)
        model_nbytes += width[tensor] * _count(distinct)
        supply = demand.supplies[tensor]
        for cell in (cell for region in distinct for cell in geometry.cells(region, supply.regions)):
            owners = {holding.worker for index in cell.holders for holding in supply.holdings[index]}
            if len(owners) == 1:
                owner = owners.pop()
                nbytes = width[tensor] * cell.region.num_elements
                by_sole_holder[owner] = by_sole_holder.get(owner, 0) + nbytes
    num_hosts = max(1, len(by_host))
    return model_nbytes, LowerBound(
        shared_egress_nbytes=-(-model_nbytes // num_trainers),
        sole_holder_nbytes=max(by_sole_holder.values(), default=0),
        host_ingress_nbytes=max(by_host.values(), default=0),
        relay_egress_nbytes=-(-(sum(by_host.values()) - model_nbytes) // num_hosts),
    )


def _count(regions: Iterable[Region]) -> int:
    return sum(region.num_elements for region in regions)


def _size(nbytes: int) -> str:
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes} B"
