"""routes: from whom each member of an exchange gets each group, given who takes the version together."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from wbridge.ids import WorkerId
from wbridge.plan.types import Exchange

Sources = tuple[WorkerId | None, ...]
"""By group: the member that passes it on, None for the trainers."""


def find_routes(exchange: Exchange, engines: Collection[str]) -> dict[WorkerId, Sources]:
    """Return the sources of each member whose engine is one of `engines`: a serving set.

    Everybody who knows the plan and the serving set finds the same routes. They have no circles, since a
    group reaches a member by at most two others: its entry, and a port on the member's own host.
    """
    here = [k for k, member in enumerate(exchange.members) if member.group in engines]
    by_host: dict[str, list[int]] = {}
    for k in here:
        by_host.setdefault(exchange.hosts[k], []).append(k)
    turns = _Turns(exchange.entries, here)
    port_turns = {host: _Turns(exchange.ports, own) for host, own in by_host.items()}
    found: dict[int, list[WorkerId | None]] = {k: [] for k in here}
    for _ in range(exchange.num_groups if here else 0):
        entry = turns.take()
        for host, own in by_host.items():
            first = entry if exchange.hosts[entry] == host else port_turns[host].take()
            for k in own:
                found[k].append(exchange.members[first])
            found[first][-1] = exchange.members[entry] if first != entry else None
    return {exchange.members[k]: tuple(sources) for k, sources in found.items()}


def duties_of(worker: WorkerId, routes: Mapping[WorkerId, Sources]) -> dict[int, list[WorkerId]]:
    """Return to whom `worker` passes each group on."""
    found: dict[int, list[WorkerId]] = {}
    for member, sources in sorted(routes.items()):
        for group, source in enumerate(sources):
            if source == worker:
                found.setdefault(group, []).append(member)
    return found


class _Turns:
    """Takes of several in proportion to their shares, evenly mixed."""

    def __init__(self, shares: Sequence[int], among: Sequence[int]) -> None:
        self._shares = {k: max(1, shares[k]) for k in among}
        self._total = sum(self._shares.values())
        self._due = dict.fromkeys(among, 0)

    def take(self) -> int:
        for k, share in self._shares.items():
            self._due[k] += share
        chosen = max(self._due, key=lambda k: (self._due[k], -k))
        self._due[chosen] -= self._total
        return chosen
