"""exchanges: which rollouts of a plan pass what they get on to each other, if that lowers the load."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from wbridge.plan.balance import SLICE_NBYTES, flows_of
from wbridge.plan.geometry import Geometry
from wbridge.plan.topology import Links, Topology, find_links, with_all_hosts
from wbridge.plan.traffic import Traffic, find_traffic
from wbridge.plan.types import Plan, PlannedExchange

SHARES: Final = 1000
"""Shares of a group's members sum to about this."""

GROUPS_PER_MEMBER: Final = 32
LEAST_GROUPS: Final = 128
"""A version that is passed on has so many groups, so that the hops of one overlap with those of others."""

SLACK: Final = 1.001
"""Relays may load the busiest link by this much more, since they load all links together less."""


def find_exchanges(plan: Plan, topology: Topology, geometry: Geometry) -> tuple[PlannedExchange, ...]:
    """Return the exchanges of `plan`, which has none; no host with trainers takes part in one."""
    links = find_links(plan.workers, plan.hosts, with_all_hosts(topology, plan.hosts))
    traffic = find_traffic(plan, geometry)
    needed = traffic.ingress()
    candidates = [own for own in _alike(plan) if len(own) > 1 and needed.get(own[0])]
    if not candidates:
        return ()
    totals: dict[tuple[int, ...], float] = {}
    arriving: dict[tuple[int, ...], float] = {}
    hosts_of = {own: _by_host(plan, own) for own in candidates}
    for own in candidates:
        totals[own] = float(needed[own[0]] * max(1, len(hosts_of[own]) - 1))
        for members in hosts_of[own]:
            arriving[members] = arriving.get(members, 0.0) + needed[own[0]]
    leaving, taking = flows_of(totals, links), flows_of(arriving, links, ingress=True)
    exchanges: list[PlannedExchange] = []
    for own in candidates:
        ports = {k: n for members in hosts_of[own] for k, n in zip(members, taking[members], strict=True)}
        inside = len(hosts_of[own]) == 1
        entries = [ports[k] for k in own] if inside else leaving[own]
        exchanges.append(PlannedExchange(own, _shares(entries), _shares([ports[k] for k in own])))
    direct = _busiest(plan, links, traffic, ())
    relayed = _busiest(plan, links, traffic, exchanges)
    return tuple(exchanges) if relayed <= direct * SLACK else ()


def group_nbytes(version_nbytes: int, num_members: int, slot_nbytes: int) -> int:
    """Return how large groups may be that `num_members` pass on."""
    wanted = version_nbytes // max(LEAST_GROUPS, GROUPS_PER_MEMBER * num_members)
    return min(slot_nbytes, max(SLICE_NBYTES, wanted))


def _alike(plan: Plan) -> Iterator[tuple[int, ...]]:
    """Yield the rollouts with each table on hosts without trainers."""
    near = {h for h, worker in zip(plan.hosts, plan.workers, strict=True) if worker.role == "trainer"}
    found: dict[int, list[int]] = {}
    for index, worker in enumerate(plan.workers):
        if worker.role == "rollout" and plan.hosts[index] not in near:
            found.setdefault(plan.table_of[index], []).append(index)
    yield from (tuple(own) for own in found.values())


def _by_host(plan: Plan, workers: Sequence[int]) -> list[tuple[int, ...]]:
    found: dict[str, list[int]] = {}
    for worker in workers:
        found.setdefault(plan.hosts[worker], []).append(worker)
    return [tuple(own) for _, own in sorted(found.items())]


def _shares(flows: Sequence[float]) -> tuple[int, ...]:
    total = sum(flows)
    return tuple(max(1, round(SHARES * flow / total)) if total else 1 for flow in flows)


def _busiest(
    plan: Plan,
    links: Links,
    traffic: Traffic,
    exchanges: Sequence[PlannedExchange],
) -> float:
    """Return the seconds of the busiest link; what stays inside a host passes none."""
    needed = traffic.ingress()
    sent = [0.0] * len(links.nics)
    got = [0.0] * len(links.nics)
    exchange_of = {k: exchange for exchange in exchanges for k in exchange.members}
    for (writer, receiver), nbytes in traffic.pairs.items():
        if plan.hosts[writer] == plan.hosts[receiver]:
            continue
        exchange = exchange_of.get(receiver)
        part = nbytes / len(exchange.members) if exchange else nbytes
        sent[links.of_worker[writer]] += part
        if not exchange:
            got[links.of_worker[receiver]] += part
    for exchange in exchanges:
        nbytes = needed[exchange.members[0]]
        by_host = _by_host(plan, exchange.members)
        ports = dict(zip(exchange.members, exchange.ports, strict=True))
        for k, share in zip(exchange.members, exchange.entries, strict=True):
            sent[links.of_worker[k]] += nbytes * share / sum(exchange.entries) * (len(by_host) - 1)
        for own in by_host:
            for k in own:
                got[links.of_worker[k]] += nbytes * ports[k] / sum(ports[m] for m in own)
    times = [n / nic.egress_gb_s for n, nic in zip(sent, links.nics, strict=True)]
    times += [n / nic.ingress_gb_s for n, nic in zip(got, links.nics, strict=True)]
    return max(times)
