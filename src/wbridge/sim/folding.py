"""folding: engines for which everything is alike, of which one is simulated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from wbridge.plan.topology import Links
from wbridge.plan.types import Plan

NEARLY: Final = 0.98
"""Kinds that get less than this part of another's bytes are simulated on their own."""

_Sharing = dict[int, dict[str, list[int]]]


def fold_engines(plan: Plan, links: Links) -> tuple[tuple[int, ...], ...]:
    """Return for each worker those that it stands for, itself included; nobody: another one stands for it.

    Two engines are alike if worker by worker they have equal tables, and so get the same from the same
    trainers, over NICs of equal speed that none but engines alike share, rank by rank. Then they get it at
    the same time: in the simulation nothing tells them apart. Those
    that pass on what they get are not folded.
    """
    found: list[tuple[int, ...]] = [(k,) for k in range(len(plan.workers))]
    engines: dict[str, list[int]] = {}
    for k, worker in enumerate(plan.workers):
        if worker.role == "rollout":
            engines.setdefault(worker.group, []).append(k)
    alike: dict[object, list[list[int]]] = {}
    sharing = _sharing(plan, links)
    passing = {k for exchange in plan.exchanges for k in exchange.members}
    kinds = {name: _kind(plan, links, sharing, own) for name, own in engines.items()}
    for name, own in engines.items():
        neighbours = {other for k in own for other in sharing[links.of_worker[k]]}
        even = all(len(set(map(tuple, sharing[links.of_worker[k]].values()))) == 1 for k in own) and all(
            kinds.get(other) == kinds[name] for other in neighbours
        )
        even = even and passing.isdisjoint(own)
        alike.setdefault(kinds[name] if even else name, []).append(own)
    for same in alike.values():
        for rank, first in enumerate(same[0]):
            found[first] = tuple(own[rank] for own in same)
            for own in same[1:]:
                found[own[rank]] = ()
    return tuple(found)


def _kind(plan: Plan, links: Links, sharing: _Sharing, own: list[int]) -> object:
    near = {host for host, worker in zip(plan.hosts, plan.workers, strict=True) if worker.role == "trainer"}
    numbers: dict[object, int] = {}
    return tuple(
        (
            plan.table_of[k],
            plan.hosts[k] if plan.hosts[k] in near else "",
            links.nics[links.of_worker[k]],
            len(sharing[links.of_worker[k]]),
            numbers.setdefault(links.of_worker[k], len(numbers)),
            numbers.setdefault(plan.hosts[k], len(numbers)),
        )
        for k in own
    )


def _sharing(plan: Plan, links: Links) -> _Sharing:
    """Return for each link the groups that use it, each with the ranks that do."""
    found: dict[int, dict[str, list[int]]] = {}
    for k, worker in enumerate(plan.workers):
        found.setdefault(links.of_worker[k], {}).setdefault(worker.group, []).append(worker.rank)
    return found


class Kind(NamedTuple):
    """Rollouts that get the same, and pass it on to each other."""

    members: tuple[int, ...]
    nbytes: int


def thin(plan: Plan, links: Links, kinds: Sequence[Kind]) -> dict[int, int]:
    """Return by number the kind that stands for each: the one among its like that gets most.

    Kinds are alike if they have as many members, placed alike on hosts, each with a NIC of its own and of
    equal speed, and get nearly the same number of bytes.
    """
    sharing = _sharing(plan, links)
    alike: dict[object, list[int]] = {}
    for number, kind in enumerate(kinds):
        places: dict[str, int] = {}
        own = [links.of_worker[k] for k in kind.members]
        alone = all(sum(map(len, sharing[link].values())) == 1 for link in own)
        shape = (
            tuple(places.setdefault(plan.hosts[k], len(places)) for k in kind.members),
            tuple(links.nics[link] for link in own),
        )
        alike.setdefault(shape if alone else number, []).append(number)
    found: dict[int, int] = {}
    for same in alike.values():
        first = -1
        for number in sorted(same, key=lambda number: (-kinds[number].nbytes, number)):
            if first < 0 or kinds[number].nbytes < NEARLY * kinds[first].nbytes:
                first = number
            found[number] = first
    return found
