"""explain: what a plan costs, next to the least that any plan would cost."""

from __future__ import annotations

import msgspec

from wbridge.config import Config
from wbridge.layout.dtype import itemsize
from wbridge.plan.bound import Bound, lower_bound
from wbridge.plan.build import ANY_TOPOLOGY
from wbridge.plan.expand import Expansion
from wbridge.plan.geometry import Geometry
from wbridge.plan.schedule import ring_slots
from wbridge.plan.sizes import size_of, time_of
from wbridge.plan.topology import Topology, find_links
from wbridge.plan.traffic import LinkLoad, between_links, find_traffic, loads_of
from wbridge.plan.types import Plan


class Link(msgspec.Struct, frozen=True):
    """Bytes that one worker sends to one rollout worker in each version: a trainer, or a rollout that has
    them."""

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
    """By rollout host; without what its rollouts pass on to each other."""
    links: tuple[Link, ...]
    casts: tuple[Cast, ...]
    memory: tuple[SlotMemory, ...]
    needed_nbytes: int
    """What all rollout workers need together, without repeated elements inside a parameter."""
    model_nbytes: int
    """Distinct checkpoint elements that any rollout needs: one copy."""
    sent_nbytes: int
    """By trainers."""
    copies_sent: float
    relayed_nbytes: int
    """What rollouts pass on to each other if all engines take a version together; 0: without relays."""
    loads: tuple[LinkLoad, ...]
    """Of each direction of each link; what trainers send inside a host counts like the rest."""
    busiest_s: float
    bound: Bound
    ratio: float
    """Seconds of the busiest link over the least that any plan needs, with rollouts that pass bytes on."""
    direct_ratio: float
    """The same over the least of plans in which trainers serve every rollout themselves."""

    def to_text(self) -> str:
        """Return the explanation as lines for a terminal."""
        lines = [
            f"plan {self.fingerprint[:12]}: {self.num_tensors} tensors in {self.num_transfers} transfers,"
            f" {self.num_unused_tensors} tensors of the trainers are not needed",
            f"needed {size_of(self.needed_nbytes)}, sent {size_of(self.sent_nbytes)},"
            f" {self.copies_sent:.2f} copies of {size_of(self.model_nbytes)}",
            f"busiest link {time_of(self.busiest_s)}, lower bound {time_of(self.bound.relayed_s)},"
            f" ratio {self.ratio:.3f}; {time_of(self.bound.direct_s)}, ratio {self.direct_ratio:.3f}, without"
            " relays",
            f"rollouts pass on {size_of(self.relayed_nbytes)}",
        ]
        lines += [
            f"load     {load.link:<32} {load.direction:<8} {size_of(load.nbytes):>12} at {load.gb_s:g} GB/s"
            f" {time_of(load.seconds):>10}, {load.seconds / self.bound.relayed_s:.3f} of the bound"
            for load in self.loads
        ]
        lines += [f"egress   {name:<32} {size_of(n):>12}" for name, n in self.egress_nbytes.items()]
        lines += [f"ingress  {name:<32} {size_of(n):>12}" for name, n in self.ingress_nbytes.items()]
        for link in self.links:
            where = "between hosts" if link.crosses_hosts else "inside a host"
            lines.append(f"link     {link.writer} -> {link.receiver}: {size_of(link.nbytes)} {where}")
        for cast in self.casts:
            lines.append(f"cast     {cast.source} -> {cast.target} as {cast.wire}: {size_of(cast.nbytes)}")
        for use in self.memory:
            lines.append(
                f"memory   {use.worker:<32} {use.num_groups} groups of up to {size_of(use.slot_nbytes)}:"
                f" direct {size_of(use.direct_nbytes)} in {use.direct_slots} slots,"
                f" pinned {size_of(use.pinned_nbytes)} in {use.pinned_slots}"
            )
            if use.lost_overlap_nbytes:
                lines.append(
                    f"overlap  {use.worker:<32} pinned slots take {use.pinned_share:.0%} of"
                    f" {size_of(use.version_nbytes)}; the other {size_of(use.lost_overlap_nbytes)} move only"
                    " while the engine is parked"
                )
        return "\n".join(lines)


def explain(plan: Plan, config: Config, topology: Topology = ANY_TOPOLOGY) -> Explanation:
    """Measure `plan`, which `build_plan` made for this config and topology."""
    geometry, expansion = Geometry(), Expansion(plan)
    links = find_links(plan.workers, plan.hosts, topology)
    traffic = find_traffic(plan, expansion)
    copy_nbytes, bound = lower_bound(plan, links, geometry)
    crossing = between_links(plan, traffic)
    sent, got = crossing.egress(), crossing.ingress()
    ingress = {plan.hosts[k]: 0 for k, worker in enumerate(plan.workers) if worker.role == "rollout"}
    for receiver, nbytes in got.items():
        ingress[plan.hosts[receiver]] += nbytes
    loads = loads_of(sent, got, links)
    busiest_s = max((load.seconds for load in loads), default=0.0)
    needed, total = (
        sum(traffic.pairs.values()),
        sum(nbytes for k, nbytes in sent.items() if plan.workers[k].role == "trainer"),
    )
    names = [str(worker) for worker in plan.workers]
    return Explanation(
        fingerprint=plan.fingerprint,
        num_tensors=sum(planned.num_tensors for planned in plan.classes),
        num_unused_tensors=plan.num_unused_tensors,
        num_transfers=_num_transfers(plan, expansion),
        egress_nbytes={names[k]: sent.get(k, 0) for k, w in enumerate(plan.workers) if w.role == "trainer"},
        ingress_nbytes=dict(sorted(ingress.items())),
        links=tuple(
            Link(names[writer], names[k], nbytes, crosses_hosts=plan.hosts[writer] != plan.hosts[k])
            for (writer, k), nbytes in sorted(traffic.pairs.items())
        ),
        casts=tuple(Cast(*pair, nbytes) for pair, nbytes in sorted(traffic.casts.items())),
        memory=_memory(plan, expansion, config),
        needed_nbytes=needed,
        model_nbytes=copy_nbytes,
        sent_nbytes=total,
        copies_sent=total / copy_nbytes if copy_nbytes else 0.0,
        relayed_nbytes=needed - total,
        loads=loads,
        busiest_s=busiest_s,
        bound=bound,
        ratio=busiest_s / bound.relayed_s if bound.relayed_s else 1.0,
        direct_ratio=busiest_s / bound.direct_s if bound.direct_s else 1.0,
    )


def _num_transfers(plan: Plan, expansion: Expansion) -> int:
    found = 0
    for members, groups in expansion.deliveries():
        table = plan.table_of[members[0]]
        counts = (count for intake, turn in groups for _, count in intake.transfers_in(turn, table))
        found += len(members) * sum(counts)
    return found


class _Sent:
    """What one trainer puts into the slots of others."""

    def __init__(self) -> None:
        self.num_groups = self.nbytes = self.largest = 0
        self.gathered: dict[int, int] = {}
        """The largest piece for each receiver into whose memory the trainer cannot gather."""


def _memory(plan: Plan, expansion: Expansion, config: Config) -> tuple[SlotMemory, ...]:
    found: dict[int, SlotMemory] = {}
    passing = {k for exchange in plan.exchanges for k in exchange.members}
    sent = {k: _Sent() for k, worker in enumerate(plan.workers) if worker.role == "trainer"}
    for members, delivered in expansion.deliveries():
        groups = [intake.groups[turn] for intake, turn in delivered]
        for k in members:
            sizes = [group.nbytes for group in groups]
            found[k] = _ring(str(plan.workers[k]), sizes, config, passes_on=k in passing)
        for piece in (piece for group in groups for piece in group.pieces):
            own = sent[piece.writer]
            own.num_groups += len(members)
            own.nbytes += piece.nbytes * len(members)
            own.largest = max(own.largest, piece.nbytes)
            for k in members:
                if plan.hosts[k] != plan.hosts[piece.writer]:
                    own.gathered[k] = max(own.gathered.get(k, 0), piece.nbytes)
    needed = {place: 0 for planned in plan.classes for cell in planned.cells for place in cell.held}
    for planned in plan.classes:
        for place in {place for cell in planned.cells for place in cell.held}:
            needed[place] += planned.num_tensors
    shards: dict[int, int] = {}
    for place, num_tensors in needed.items():
        row = plan.row(place)
        nbytes = num_tensors * row.region.num_elements * itemsize(row.dtype)
        shards[place[0]] = shards.get(place[0], 0) + nbytes
    for k, own in sent.items():
        found[k] = SlotMemory(
            worker=str(plan.workers[k]),
            num_groups=own.num_groups,
            slot_nbytes=own.largest,
            direct_slots=config.local_slots * len(own.gathered),
            direct_nbytes=config.local_slots * sum(own.gathered.values()),
            pinned_slots=config.snapshot_versions,
            pinned_nbytes=config.snapshot_versions * shards.get(plan.table_of[k], 0),
            version_nbytes=own.nbytes,
            pinned_share=1.0,
            lost_overlap_nbytes=0,
        )
    return tuple(found[k] for k in sorted(found))


def _ring(worker: str, sizes: list[int], config: Config, *, passes_on: bool) -> SlotMemory:
    slot_nbytes, version_nbytes = max(sizes, default=0), sum(sizes)
    direct_slots = ring_slots(config, len(sizes), "direct", passes_on=passes_on)
    pinned_slots = ring_slots(config, len(sizes), "pinned")
    lost_nbytes = sum(sizes[pinned_slots:])
    return SlotMemory(
        worker=worker,
        num_groups=len(sizes),
        slot_nbytes=slot_nbytes,
        direct_slots=direct_slots,
        direct_nbytes=direct_slots * slot_nbytes,
        pinned_slots=pinned_slots,
        pinned_nbytes=pinned_slots * slot_nbytes,
        version_nbytes=version_nbytes,
        pinned_share=1 - lost_nbytes / version_nbytes if version_nbytes else 1.0,
        lost_overlap_nbytes=lost_nbytes,
    )
