"""traffic: the bytes of a plan by pair of workers, by link and by cast."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from wbridge.layout.dtype import itemsize
from wbridge.plan.balance import ANYWHERE, spread
from wbridge.plan.geometry import Geometry
from wbridge.plan.topology import Links
from wbridge.plan.types import Plan, PlannedCell


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


def find_traffic(plan: Plan, geometry: Geometry) -> Traffic:
    """Count what a plan moves."""
    near = {h for h, worker in zip(plan.hosts, plan.workers, strict=True) if worker.role == "trainer"}
    receivers: list[dict[str, list[int]]] = [{} for _ in plan.tables]
    for index, table in enumerate(plan.table_of):
        if plan.workers[index].role == "rollout":
            host = plan.hosts[index] if plan.hosts[index] in near else ANYWHERE
            receivers[table].setdefault(host, []).append(index)
    pairs: dict[tuple[int, int], int] = {}
    casts: dict[tuple[str, str, str], int] = {}
    for planned in plan.classes:
        for cell in planned.cells:
            sent = {host: _by_owner(cell, counts, geometry) for host, counts in cell.counts.items()}
            source = plan.row(cell.held[0]).dtype
            for place in cell.needed:
                target = plan.row(place).dtype
                for host, members in receivers[place[0]].items():
                    for index in members:
                        for owner, nbytes in sent[host]:
                            pairs[owner, index] = pairs.get((owner, index), 0) + nbytes
                    if source != target:
                        pair = (source, target, cell.wire_dtype)
                        moved = planned.num_tensors * cell.nbytes * len(members)
                        casts[pair] = casts.get(pair, 0) + moved
    return Traffic(pairs, casts)


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


def _by_owner(cell: PlannedCell, counts: Sequence[int], geometry: Geometry) -> list[tuple[int, int]]:
    """Return what each owner sends of a cell to one receiver."""
    width = itemsize(cell.wire_dtype)
    blocks = geometry.blocks(cell.region, cell.max_elements)
    sizes = [block.num_elements * width for block in blocks]
    if len(set(sizes)) == 1:
        return [(owner, n * sizes[0]) for owner, n in zip(cell.owners, counts, strict=True) if n]
    sent: dict[int, int] = {}
    for unit, turn in enumerate(spread(counts)):
        sent[turn] = sent.get(turn, 0) + sizes[unit % len(sizes)]
    return [(cell.owners[turn], nbytes) for turn, nbytes in sorted(sent.items())]


def _sums(amounts: Iterable[tuple[int, int]]) -> dict[int, int]:
    found: dict[int, int] = {}
    for key, nbytes in amounts:
        found[key] = found.get(key, 0) + nbytes
    return found
