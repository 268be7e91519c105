"""traffic: the bytes of a plan by pair of workers, by link and by cast."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from wbridge.plan.expand import Expansion, Intake
from wbridge.plan.routes import iter_hops
from wbridge.plan.topology import Links
from wbridge.plan.types import Exchange, Plan


class Traffic(msgspec.Struct, frozen=True):
    """Bytes by (writer, receiver), as indices of workers, and by (source, target, wire dtype)."""

    pairs: dict[tuple[int, int], int]
    casts: dict[tuple[str, str, str], int]

    def egress(self) -> dict[int, int]:
        """Return the bytes that each writer sends."""
        return _sums((writer, n) for (writer, _), n in self.pairs.items())

    def ingress(self) -> dict[int, int]:
        """Return the bytes that each receiver gets."""
        return _sums((receiver, n) for (_, receiver), n in self.pairs.items())


class LinkLoad(msgspec.Struct, frozen=True):
    """What one direction of a link carries in each version, and for how long that keeps it busy."""

    link: str
    direction: str
    nbytes: int
    gb_s: float

    @property
    def seconds(self) -> float:
        return self.nbytes / (self.gb_s * 1e9)


def find_traffic(plan: Plan, expansion: Expansion) -> Traffic:
    """Count what moves if all engines take a version together."""
    pairs = pairs_of(plan, expansion.deliveries(), expansion.exchanges())
    return Traffic(dict(sorted(pairs.items())), _casts(plan))


def pairs_of(
    plan: Plan,
    deliveries: Iterable[tuple[Sequence[int], Sequence[tuple[Intake, int]]]],
    exchanges: Iterable[Exchange],
) -> dict[tuple[int, int], int]:
    """Return the bytes by (writer, receiver) of these groups, if all engines take them together."""
    index = {worker: k for k, worker in enumerate(plan.workers)}
    passed: dict[int, dict[int, int]] = {}
    engines = {worker.group for worker in plan.workers if worker.role == "rollout"}
    for hop in iter_hops(exchanges, engines):
        passed.setdefault(index[hop.receiver], {})[hop.received] = index[hop.sender]
    pairs: dict[tuple[int, int], int] = {}
    for members, groups in deliveries:
        pieces = [intake.groups[turn].pieces for intake, turn in groups]
        for k in members:
            sources = passed.get(k, {})
            for number, own in enumerate(pieces):
                source = sources.get(number)
                for piece in own:
                    pair = piece.writer if source is None else source, k
                    pairs[pair] = pairs.get(pair, 0) + piece.nbytes
    return pairs


def _casts(plan: Plan) -> dict[tuple[str, str, str], int]:
    counts: dict[int, int] = {}
    for worker, table in zip(plan.workers, plan.table_of, strict=True):
        counts[table] = counts.get(table, 0) + (worker.role == "rollout")
    casts: dict[tuple[str, str, str], int] = {}
    for planned in plan.classes:
        for cell in planned.cells:
            source = plan.row(cell.held[0]).dtype
            for table, target in {place[0]: plan.row(place).dtype for place in cell.needed}.items():
                if source != target:
                    pair = (source, target, cell.wire_dtype)
                    moved = planned.num_tensors * cell.nbytes * counts[table]
                    casts[pair] = casts.get(pair, 0) + moved
    return casts


def between_links(plan: Plan, traffic: Traffic) -> Traffic:
    """Leave out what rollouts pass on inside a host: it passes no link."""
    pairs = {
        (writer, k): nbytes
        for (writer, k), nbytes in traffic.pairs.items()
        if plan.workers[writer].role == "trainer" or plan.hosts[writer] != plan.hosts[k]
    }
    return Traffic(pairs, traffic.casts)


def loads_of(sent: Mapping[int, float], got: Mapping[int, float], links: Links) -> tuple[LinkLoad, ...]:
    """Return the load of each direction of each link from what its workers send and get."""
    found: list[LinkLoad] = []
    for direction, by_worker in (("egress", sent), ("ingress", got)):
        by_link: dict[int, float] = {}
        for worker, nbytes in by_worker.items():
            link = links.of_worker[worker]
            by_link[link] = by_link.get(link, 0.0) + nbytes
        for link, nbytes in sorted(by_link.items()):
            nic = links.nics[link]
            gb_s = nic.egress_gb_s if direction == "egress" else nic.ingress_gb_s
            found.append(LinkLoad(links.names[link], direction, round(nbytes), gb_s))
    return tuple(found)


def _sums(amounts: Iterable[tuple[int, int]]) -> dict[int, int]:
    found: dict[int, int] = {}
    for key, nbytes in amounts:
        found[key] = found.get(key, 0) + nbytes
    return found
