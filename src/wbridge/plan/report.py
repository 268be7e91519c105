"""report: an explanation by kinds of links and of rings, for people: a fleet has too many of each."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from wbridge.plan.explain import Explanation
from wbridge.plan.topology import Links
from wbridge.plan.traffic import LinkLoad
from wbridge.plan.types import Plan

LOCAL = "inside a host"


class LinkClass(msgspec.Struct, frozen=True):
    """All links that carry the same in one direction: what trainers send, what rollouts get."""

    name: str
    num_links: int
    total_nbytes: int
    largest_nbytes: int
    busiest_s: float
    """0 for bytes inside a host: of memory no bandwidth is known."""
    of_bound: float
    """`busiest_s` over the lower bound."""


class Carried(msgspec.Struct, frozen=True):
    """One pair's part of the busiest link's load."""

    writer: str
    receiver: str
    nbytes: int
    share: float


class RingClass(msgspec.Struct, frozen=True):
    """The slots of all workers of a role; each number is the largest, groups as (least, most)."""

    role: str
    num_workers: int
    num_groups: tuple[int, int]
    slot_nbytes: int
    direct_slots: int
    direct_nbytes: int
    pinned_slots: int
    pinned_nbytes: int
    lost_overlap_nbytes: int


class Report(msgspec.Struct, frozen=True):
    """What `wbridge plan explain` shows."""

    reason: str
    """The part of the lower bound that decides."""
    classes: tuple[LinkClass, ...]
    busiest: LinkLoad | None
    carried: tuple[Carried, ...]
    """Transfers on the busiest link, largest first."""
    rings: tuple[RingClass, ...]
    explanation: Explanation


def report_of(plan: Plan, explanation: Explanation, links: Links) -> Report:
    """Sum up an explanation that was made with these links."""
    names = [str(worker) for worker in plan.workers]
    link_of = {name: links.names[links.of_worker[k]] for k, name in enumerate(names)}
    roles: dict[str, set[str]] = {}
    for k, worker in enumerate(plan.workers):
        roles.setdefault(links.names[links.of_worker[k]], set()).add(worker.role)
    busiest = max(explanation.loads, key=lambda load: load.seconds, default=None)
    return Report(
        reason=_reason(explanation),
        classes=_classes(explanation, roles),
        busiest=busiest,
        carried=() if busiest is None else _carried(explanation, busiest, link_of),
        rings=_rings(explanation),
        explanation=explanation,
    )


def _reason(explanation: Explanation) -> str:
    bound = explanation.bound
    reasons = {
        "one copy over the egress of all trainers": bound.shared_egress_s,
        "what only the trainers of one link hold, over its egress": bound.sole_holder_s,
        "what one rollout host needs, over its ingress": bound.host_ingress_s,
        "what rollout hosts pass on, over the egress of them all": bound.relay_egress_s,
    }
    return max(reasons, key=lambda reason: reasons[reason])


def _classes(explanation: Explanation, roles: Mapping[str, set[str]]) -> tuple[LinkClass, ...]:
    loads: dict[str, list[LinkLoad]] = {}
    for load in explanation.loads:
        who = " and ".join(sorted(roles[load.link], reverse=True))
        loads.setdefault(f"{who} {load.direction}", []).append(load)
    least_s = explanation.bound.relayed_s
    found = []
    for name, own in sorted(loads.items(), reverse=True):
        busiest_s = max(load.seconds for load in own)
        sizes = [load.nbytes for load in own]
        ratio = busiest_s / least_s if least_s else 1.0
        found.append(LinkClass(name, len(own), sum(sizes), max(sizes), busiest_s, ratio))
    local = [link.nbytes for link in explanation.links if not link.crosses_hosts]
    if local:
        found.append(LinkClass(LOCAL, len(local), sum(local), max(local), 0.0, 0.0))
    return tuple(found)


def _carried(explanation: Explanation, busiest: LinkLoad, link_of: Mapping[str, str]) -> tuple[Carried, ...]:
    found = [
        Carried(link.writer, link.receiver, link.nbytes, link.nbytes / busiest.nbytes)
        for link in explanation.links
        if link_of[link.writer if busiest.direction == "egress" else link.receiver] == busiest.link
        and (link.crosses_hosts or link.writer.startswith("trainer/"))
    ]
    return tuple(sorted(found, key=lambda carried: -carried.nbytes))


def _rings(explanation: Explanation) -> tuple[RingClass, ...]:
    found = []
    for role in ("trainer", "rollout"):
        own = [memory for memory in explanation.memory if memory.worker.startswith(f"{role}/")]
        counts = [memory.num_groups for memory in own]
        largest = [max(getattr(memory, name) for memory in own) for name in RingClass.__struct_fields__[3:]]
        found.append(RingClass(role, len(own), (min(counts), max(counts)), *largest))
    return tuple(found)
