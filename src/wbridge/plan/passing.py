"""passing: the bytes of a plan by pair of workers when rollouts pass on what they get."""

from __future__ import annotations

from wbridge.plan.expand import Expansion
from wbridge.plan.routes import find_routes
from wbridge.plan.traffic import Traffic
from wbridge.plan.types import Plan


def passed_on(plan: Plan, expansion: Expansion, traffic: Traffic) -> Traffic:
    """Return what moves if all engines take a version together; `traffic` is what trainers would send."""
    inside = {k for exchange in plan.exchanges for k in exchange.members}
    pairs = {pair: nbytes for pair, nbytes in traffic.pairs.items() if pair[1] not in inside}
    index = {worker: k for k, worker in enumerate(plan.workers)}
    for members, intake, exchange in expansion.exchanges():
        routes = find_routes(exchange, {plan.workers[k].group for k in members})
        for member, sources in routes.items():
            for group, source in zip(intake.groups, sources, strict=True):
                if source is not None:
                    parts = [(index[source], group.nbytes)]
                else:
                    parts = [(piece.writer, piece.nbytes) for piece in group.pieces]
                for writer, nbytes in parts:
                    pair = (writer, index[member])
                    pairs[pair] = pairs.get(pair, 0) + nbytes
    return Traffic(dict(sorted(pairs.items())), traffic.casts)


def between_links(plan: Plan, traffic: Traffic) -> Traffic:
    """Leave out what rollouts pass on inside a host: it passes no link."""
    pairs = {
        (writer, k): nbytes
        for (writer, k), nbytes in traffic.pairs.items()
        if plan.workers[writer].role == "trainer" or plan.hosts[writer] != plan.hosts[k]
    }
    return Traffic(pairs, traffic.casts)
