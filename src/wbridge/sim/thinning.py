"""thinning: of ranks that pass on the same to their like, one is simulated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from wbridge.ids import WorkerId
from wbridge.plan.expand import Intake
from wbridge.plan.topology import Links
from wbridge.plan.traffic import pairs_of
from wbridge.plan.types import Exchange, Plan
from wbridge.sim.folding import Kind, thin

Deliveries = Sequence[tuple[Sequence[int], Sequence[tuple[Intake, int]]]]
"""Rollouts that get the same, by their indices, and the groups that each of them receives."""


class Thinned(NamedTuple):
    """What is simulated, and for how many rollouts each of those stands."""

    deliveries: Deliveries
    exchanges: tuple[Exchange, ...]
    num_alike: dict[int, int]


def thinned(plan: Plan, links: Links, deliveries: Deliveries, exchanges: Sequence[Exchange]) -> Thinned:
    """Leave out ranks for which others stand.

    Of what those pass on to ranks that are left out, as much is kept as falls to them: each n-th group.
    """
    inside = {member for exchange in exchanges for member in exchange.members}
    passing = [own for own in deliveries if plan.workers[own[0][0]] in inside]
    kinds = [Kind(tuple(members), _nbytes(groups)) for members, groups in passing]
    stands_for = thin(plan, links, kinds)
    num_alike: dict[int, int] = {}
    kept: list[tuple[Sequence[int], Sequence[tuple[Intake, int]]]] = []
    numbers: dict[WorkerId, dict[int, int]] = {}
    here = {k for number in set(stands_for.values()) for k in kinds[number].members}
    every = {id(exchange): _every(plan, exchange, here) for exchange in exchanges}
    turns = _turns(exchanges)
    for number, (members, groups) in enumerate(passing):
        if stands_for[number] != number:
            continue
        worker = plan.workers[members[0]]
        left = [k for k in range(len(groups)) if _is_kept(turns.get((worker, k)), every)]
        kept.append((members, [groups[k] for k in left]))
        for k in members:
            num_alike[k] = sum(other == number for other in stands_for.values())
            numbers[plan.workers[k]] = {old: new for new, old in enumerate(left)}
    kept += [own for own in deliveries if plan.workers[own[0][0]] not in inside]
    return Thinned(kept, tuple(_restricted(exchange, numbers) for exchange in exchanges), num_alike)


def busy(plan: Plan, links: Links, deliveries: Deliveries, exchanges: Iterable[Exchange]) -> dict[int, float]:
    """Return for how many seconds of a version these keep each NIC of a trainer busy."""
    found: dict[int, float] = {}
    for (writer, _), nbytes in pairs_of(plan, deliveries, exchanges).items():
        if plan.workers[writer].role == "trainer":
            link = links.of_worker[writer]
            found[link] = found.get(link, 0.0) + nbytes / (links.nics[link].egress_gb_s * 1e9)
    return found


def _nbytes(groups: Iterable[tuple[Intake, int]]) -> int:
    return sum(intake.groups[turn].nbytes for intake, turn in groups)


def _turns(exchanges: Iterable[Exchange]) -> dict[tuple[WorkerId, int], tuple[int, int]]:
    """Return the exchange and turn of each group that is passed on, by member and index there."""
    return {
        (member, number): (id(exchange), turn)
        for exchange in exchanges
        for member, own in zip(exchange.members, exchange.numbers, strict=True)
        for turn, number in enumerate(own)
    }


def _every(plan: Plan, exchange: Exchange, here: set[int]) -> int:
    """Return of how many groups one is kept."""
    members = set(exchange.members)
    left = sum(plan.workers[k] in members for k in here)
    return round(len(members) / left) if left else 1


def _is_kept(turn: tuple[int, int] | None, every: dict[int, int]) -> bool:
    return turn is None or turn[1] % every[turn[0]] == 0


def _restricted(exchange: Exchange, numbers: dict[WorkerId, dict[int, int]]) -> Exchange:
    """Leave out members and groups that are not simulated."""
    left = [k for k, member in enumerate(exchange.members) if member in numbers]
    turns = [
        [turn for turn, old in enumerate(exchange.numbers[k]) if old in numbers[exchange.members[k]]]
        for k in left
    ]
    return msgspec.structs.replace(
        exchange,
        members=tuple(exchange.members[k] for k in left),
        hosts=tuple(exchange.hosts[k] for k in left),
        entries=tuple(exchange.entries[k] for k in left),
        ports=tuple(exchange.ports[k] for k in left),
        numbers=tuple(
            tuple(numbers[exchange.members[k]][exchange.numbers[k][turn]] for turn in own)
            for k, own in zip(left, turns, strict=True)
        ),
        sizes=tuple(exchange.sizes[turn] for turn in turns[0]) if turns else (),
    )
