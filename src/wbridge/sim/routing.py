"""Routing: from whom each rollout gets each group, once it is known who takes a version together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from wbridge.plan.expand import Expansion
from wbridge.plan.routes import duties_of, find_routes
from wbridge.plan.types import Exchange, Plan

Sources = Sequence[int | None]
"""By group: the rollout that passes it on, None for the trainers."""


class Routing:
    """The exchanges of a plan, by the indices of workers."""

    def __init__(self, plan: Plan, expansion: Expansion) -> None:
        self._index = {worker: k for k, worker in enumerate(plan.workers)}
        self._workers = plan.workers
        self._exchange_of: dict[int, Exchange] = {}
        for members, _, exchange in expansion.exchanges():
            self._exchange_of.update(dict.fromkeys(members, exchange))
        self._known: dict[tuple[int, frozenset[str]], Mapping[int, Sources]] = {}

    def is_member(self, worker: int) -> bool:
        return worker in self._exchange_of

    def others(self, worker: int) -> tuple[int, ...]:
        """Return to whom it may pass something on."""
        exchange = self._exchange_of.get(worker)
        return (
            () if exchange is None else tuple(k for m in exchange.members if (k := self._index[m]) != worker)
        )

    def sources(self, worker: int, engines: Iterable[str]) -> Sources | None:
        """Return from whom it gets each group; None: all from the trainers."""
        return None if worker not in self._exchange_of else self._all(worker, engines)[worker]

    def duties(self, worker: int, engines: Iterable[str]) -> Mapping[int, Sequence[int]]:
        """Return to whom it passes on each group."""
        routes = find_routes(self._exchange_of[worker], frozenset(engines))
        found = duties_of(self._workers[worker], routes)
        return {group: [self._index[member] for member in own] for group, own in found.items()}

    def _all(self, worker: int, engines: Iterable[str]) -> Mapping[int, Sources]:
        exchange, together = self._exchange_of[worker], frozenset(engines)
        key = id(exchange), together
        if key not in self._known:
            routes = find_routes(exchange, together)
            self._known[key] = {
                self._index[member]: [None if s is None else self._index[s] for s in sources]
                for member, sources in routes.items()
            }
        return self._known[key]
