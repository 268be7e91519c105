"""relays: routes on which rollouts pass on what they have, so that trainers send one copy.

What the same rollouts need travels in batches. Trainers send a batch to one of them, its *entry*. The entry
sends it to one worker on each other host that needs it, the *port* there, and ports to the others on their
host. Entries and ports are chosen so that no link is busier than the bytes demand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from wbridge.plan.balance import SLICE_NBYTES, Ledger, flows_of
from wbridge.plan.bound import iter_parts
from wbridge.plan.geometry import Geometry
from wbridge.plan.topology import Links
from wbridge.plan.traffic import LinkLoad, loads_of
from wbridge.plan.types import Plan


class Spread(msgspec.Struct, frozen=True):
    """Where the batches of what the same rollouts need enter, and who takes them on every other host."""

    nbytes: int
    num_batches: int
    entries: dict[int, int]
    """Batches that come from trainers, by worker."""
    ports: dict[int, int]
    """Batches that come from an entry on another host, by worker."""
    num_hosts: int


class Relays(msgspec.Struct, frozen=True):
    """All routes of a version, and what they load."""

    spreads: tuple[Spread, ...]
    egress_nbytes: dict[int, float]
    """What each trainer sends."""
    loads: tuple[LinkLoad, ...]

    @property
    def busiest_s(self) -> float:
        return max((load.seconds for load in self.loads), default=0.0)


def find_relays(plan: Plan, links: Links, geometry: Geometry) -> Relays:
    """Route what `plan` moves through relays; the trainers' shares are those of one copy."""
    held: dict[tuple[int, ...], float] = {}
    needed: dict[tuple[int, ...], int] = {}
    for part in iter_parts(plan, geometry):
        held[part.owners] = held.get(part.owners, 0.0) + part.nbytes
        receivers = tuple(sorted(set(part.receivers)))
        needed[receivers] = needed.get(receivers, 0) + part.nbytes
    egress: dict[int, float] = {}
    for owners, flow in flows_of(held, links).items():
        for owner, nbytes in zip(owners, flow, strict=True):
            egress[owner] = egress.get(owner, 0.0) + nbytes
    by_host = {receivers: _by_host(plan, receivers) for receivers in needed}
    forwarded = {r: float(n * (len(by_host[r]) - 1)) for r, n in needed.items()}
    entering = flows_of(forwarded, links)
    arriving = flows_of({own: float(n) for own, n in _arrivals(needed, by_host).items()}, links, ingress=True)
    ledgers: dict[tuple[int, ...], Ledger] = {}
    spreads: list[Spread] = []
    for receivers, nbytes in needed.items():
        hosts = by_host[receivers]
        if len(hosts) == 1:
            quotas = [_share(nbytes, own, arriving, w) for own in hosts.values() for w in own]
        else:
            quotas = [flow / (len(hosts) - 1) for flow in entering[receivers]]
        ledger = ledgers.setdefault(receivers, Ledger(quotas, sum(quotas)))
        num_batches = _num_batches(nbytes, len(receivers), plan.slot_nbytes, ledger)
        counts = dict(zip(receivers, ledger.ship(num_batches, nbytes), strict=True))
        ports: dict[int, int] = {}
        for own in hosts.values():
            others = num_batches - sum(counts[w] for w in own)
            shares = [_share(nbytes, own, arriving, w) for w in own]
            ports.update(zip(own, Ledger(shares, sum(shares)).ship(others, nbytes), strict=True))
        spreads.append(Spread(nbytes, num_batches, counts, ports, len(hosts)))
    return Relays(tuple(spreads), egress, _loads(spreads, egress, links))


def _by_host(plan: Plan, workers: Sequence[int]) -> dict[str, tuple[int, ...]]:
    found: dict[str, list[int]] = {}
    for worker in workers:
        found.setdefault(plan.hosts[worker], []).append(worker)
    return {host: tuple(own) for host, own in sorted(found.items())}


def _arrivals(
    needed: Mapping[tuple[int, ...], int], by_host: Mapping[tuple[int, ...], Mapping[str, tuple[int, ...]]]
) -> dict[tuple[int, ...], int]:
    """Return the bytes that arrive at a host once, by the workers there that can take them."""
    found: dict[tuple[int, ...], int] = {}
    for receivers, nbytes in needed.items():
        for own in by_host[receivers].values():
            found[own] = found.get(own, 0) + nbytes
    return found


def _share(
    nbytes: int, own: tuple[int, ...], arriving: Mapping[tuple[int, ...], Sequence[float]], worker: int
) -> float:
    flow = arriving[own]
    total = sum(flow)
    return nbytes * flow[own.index(worker)] / total if total else 0.0


def _num_batches(nbytes: int, num_workers: int, slot_nbytes: int, ledger: Ledger) -> int:
    """Return the fewest batches of at most a slot that divide finely enough."""
    least, most = max(1, -(-nbytes // slot_nbytes)), max(1, nbytes // SLICE_NBYTES)
    wanted = math.ceil(least / num_workers) * num_workers
    while least < most and not ledger.is_fine(least):
        least, wanted = wanted, 2 * wanted
    return least


def _loads(spreads: Sequence[Spread], egress: Mapping[int, float], links: Links) -> tuple[LinkLoad, ...]:
    sent = dict(egress)
    got: dict[int, float] = {}
    for spread in spreads:
        batch = spread.nbytes / spread.num_batches
        for worker, count in spread.entries.items():
            sent[worker] = sent.get(worker, 0.0) + batch * count * (spread.num_hosts - 1)
            got[worker] = got.get(worker, 0.0) + batch * count
        for worker, count in spread.ports.items():
            got[worker] = got.get(worker, 0.0) + batch * count
    return loads_of(sent, got, links)
