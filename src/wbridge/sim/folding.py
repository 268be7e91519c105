"""folding: engines for which everything is alike, of which one is simulated."""

from __future__ import annotations

from wbridge.plan.topology import Links
from wbridge.plan.types import Plan

_Sharing = dict[int, dict[str, list[int]]]


def fold(plan: Plan, links: Links) -> tuple[tuple[int, ...], ...]:
    """Return for each worker those that it stands for, itself included; nobody: another one stands for it.

    Two engines are alike if worker by worker they have equal tables, and so get the same from the same
    trainers, over NICs of equal speed that none but engines alike share, rank by rank. Then they get it at
    the same time: in the simulation nothing tells them apart.
    """
    found: list[tuple[int, ...]] = [(k,) for k in range(len(plan.workers))]
    engines: dict[str, list[int]] = {}
    for k, worker in enumerate(plan.workers):
        if worker.role == "rollout":
            engines.setdefault(worker.group, []).append(k)
    alike: dict[object, list[list[int]]] = {}
    sharing = _sharing(plan, links)
    kinds = {name: _kind(plan, links, sharing, own) for name, own in engines.items()}
    for name, own in engines.items():
        neighbours = {other for k in own for other in sharing[links.of_worker[k]]}
        even = all(len(set(map(tuple, sharing[links.of_worker[k]].values()))) == 1 for k in own) and all(
            kinds.get(other) == kinds[name] for other in neighbours
        )
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
