"""Routing: from whom each rollout gets each group, once it is known who takes a version together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from wbridge.plan.routes import iter_hops, partners_of
from wbridge.plan.types import Exchange, Plan

Sources = Mapping[int, int]
"""By group: the rollout that passes it on. The others come from the trainers."""

Duties = Mapping[int, Sequence[tuple[int, int]]]
"""By group: the rollouts to which it is passed on, and which of their groups it is."""


class Routing:
    """The exchanges of a plan, by the indices of workers."""

    def __init__(self, plan: Plan, exchanges: Iterable[Exchange]) -> None:
        self._index = {worker: k for k, worker in enumerate(plan.workers)}
        self._exchanges = tuple(exchanges)
        self._others: dict[int, set[int]] = {}
        for exchange in self._exchanges:
            for member in exchange.members:
                others = self._others.setdefault(self._index[member], set())
                others.update(self._index[partner] for partner in partners_of(exchange, member))
        self._known: dict[frozenset[str], tuple[dict[int, dict[int, int]], dict[int, _Duties]]] = {}

    def others(self, worker: int) -> tuple[int, ...]:
        """Return to whom it may pass something on; nobody: it is in no exchange."""
        return tuple(sorted(self._others.get(worker, ())))

    def sources(self, worker: int, engines: Iterable[str]) -> Sources:
        """Return from whom it gets what others pass on."""
        return self._all(engines)[0].get(worker, {})

    def duties(self, worker: int, engines: Iterable[str]) -> Duties:
        """Return to whom it passes on each group."""
        return self._all(engines)[1].get(worker, {})

    def _all(self, engines: Iterable[str]) -> tuple[dict[int, dict[int, int]], dict[int, _Duties]]:
        together = frozenset(engines)
        if together not in self._known:
            sources: dict[int, dict[int, int]] = {}
            duties: dict[int, _Duties] = {}
            for hop in iter_hops(self._exchanges, together):
                sender, receiver = self._index[hop.sender], self._index[hop.receiver]
                sources.setdefault(receiver, {})[hop.received] = sender
                duties.setdefault(sender, {}).setdefault(hop.sent, []).append((receiver, hop.received))
            self._known = {together: (sources, duties)}
        return self._known[together]


_Duties = dict[int, list[tuple[int, int]]]
