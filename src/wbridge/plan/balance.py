"""The balance pass: which holder sends what, so that the most loaded link sends the least."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from wbridge.config import Config
from wbridge.layout.dtype import itemsize
from wbridge.plan.cells import Cell
from wbridge.plan.classes import Members
from wbridge.plan.geometry import Geometry
from wbridge.plan.level import level
from wbridge.plan.receivers import ANYWHERE, Rollouts
from wbridge.plan.topology import Links
from wbridge.plan.types import Place, PlannedCell, PlannedExchange

SLICE_NBYTES = 64 * 2**10
"""Tensors are divided among their owners in blocks of at least this many bytes."""

CHUNKS_PER_SLOT = 4
"""Blocks are at most this part of a slot, so a closed group leaves little of it empty."""

FINE = 0.01
"""A tensor need not be divided further when the owners' parts miss their quotas by less than this."""

Workers = tuple[int, ...]
"""Workers that hold or need the same elements, by their indices in ascending order."""


class Balance:
    """Divides the cells of a plan, given in order, among their owners."""

    def __init__(
        self,
        cells: Sequence[tuple[int, Cell]],
        members: Members,
        rollouts: Rollouts,
        hosts: Sequence[str],
        links: Links,
        exchanges: Iterable[PlannedExchange] = (),
    ) -> None:
        """`cells` with the number of tensors of each. What is in one of `exchanges` is sent once."""
        self._rollouts = rollouts
        self._trainers = members.of_table("trainer")
        self._exchanged = {exchange.tables for exchange in exchanges}
        self._owners: dict[tuple[Place, ...], Workers] = {}
        self._receivers: dict[tuple[Place, ...], dict[str, int]] = {}
        totals: dict[Workers, dict[str, float]] = {}
        for num_tensors, cell in cells:
            amounts = totals.setdefault(self.owners(cell), {})
            for host, count in self._counted(cell).items():
                amounts[host] = amounts.get(host, 0) + num_tensors * cell.nbytes * count
        self.flows = flows_of({o: sum(t.values()) for o, t in totals.items()}, links)
        """What each owner sends, by the owners of the same elements."""
        self._ledgers: dict[tuple[Workers, str], Ledger] = {}
        for owners, flow in self.flows.items():
            for host, quotas in _place(totals[owners], owners, flow, hosts).items():
                self._ledgers[owners, host] = Ledger(quotas, totals[owners][host])

    def owners(self, cell: Cell) -> Workers:
        if cell.held not in self._owners:
            found = sorted(index for table, _ in cell.held for index in self._trainers[table])
            self._owners[cell.held] = tuple(found)
        return self._owners[cell.held]

    def _counted(self, cell: Cell) -> Mapping[str, int]:
        """Return how often a cell is sent, by where to."""
        if cell.needed not in self._receivers:
            self._receivers[cell.needed] = {
                host: 1
                if host == ANYWHERE and tables in self._exchanged
                else len(self._rollouts.of_stream((tables, host)))
                for host, tables in self._rollouts.needing(cell.needed).items()
            }
        return self._receivers[cell.needed]

    def divide(self, num_tensors: int, cell: Cell, geometry: Geometry, config: Config) -> PlannedCell:
        """Say which owner sends which part of a cell; to be called for each cell in turn."""
        owners = self.owners(cell)
        ledgers = {host: self._ledgers[owners, host] for host in sorted(self._counted(cell))}
        num_blocks, max_elements = 1, 1
        for max_elements in _block_sizes(cell, num_tensors, len(owners), config):
            num_blocks = len(geometry.blocks(cell.region, max_elements))
            if all(ledger.is_fine(num_tensors * num_blocks) for ledger in ledgers.values()):
                break
        num_units = num_tensors * num_blocks
        counts = {host: ledger.ship(num_units, num_tensors * cell.nbytes) for host, ledger in ledgers.items()}
        return PlannedCell(
            region=cell.region,
            wire_dtype=cell.wire_dtype,
            held=cell.held,
            needed=cell.needed,
            num_blocks=num_blocks,
            max_elements=max_elements,
            owners=owners,
            counts=counts,
        )


def _block_sizes(cell: Cell, num_tensors: int, num_owners: int, config: Config) -> Iterator[int]:
    """Yield ever smaller blocks, in elements: first the largest that travel well."""
    num_elements = cell.region.num_elements
    largest = max(1, config.slot_nbytes // CHUNKS_PER_SLOT // itemsize(cell.wire_dtype))
    least = -(-num_elements // largest)
    yield -(-num_elements // least)
    most = max(least, min(num_elements, cell.nbytes // SLICE_NBYTES))
    step = num_owners // math.gcd(num_tensors, num_owners)
    wanted = -(-least // step) * step
    while wanted < most:
        yield -(-num_elements // wanted)
        wanted *= 2
    yield -(-num_elements // most)


def flows_of(
    totals: Mapping[Workers, float], links: Links, *, ingress: bool = False
) -> dict[Workers, list[float]]:
    """Divide bytes among workers that may send (or take) them so that their links are busy equally long."""
    amounts: dict[tuple[int, ...], float] = {}
    for workers, nbytes in totals.items():
        own = tuple(sorted({links.of_worker[k] for k in workers}))
        amounts[own] = amounts.get(own, 0.0) + nbytes
    parts = level(amounts, [nic.ingress_gb_s if ingress else nic.egress_gb_s for nic in links.nics])
    flows: dict[Workers, list[float]] = {}
    for workers, nbytes in totals.items():
        of_worker = [links.of_worker[k] for k in workers]
        own = tuple(sorted(set(of_worker)))
        of_link = dict(zip(own, parts[own], strict=True))
        share = nbytes / amounts[own] if amounts[own] else 0.0
        flows[workers] = [of_link[link] * share / of_worker.count(link) for link in of_worker]
    return flows


def _place(
    amounts: Mapping[str, float], owners: Workers, flow: Sequence[float], hosts: Sequence[str]
) -> dict[str, list[float]]:
    """Divide each owner's flow among the receivers' hosts: first its own, then the others."""
    left = list(flow)
    quotas = {host: [0.0] * len(owners) for host in amounts}
    wanted: dict[str, float] = {}
    for host in sorted(amounts):
        local = [k for k, owner in enumerate(owners) if hosts[owner] == host]
        available = sum(left[k] for k in local)
        taken = min(amounts[host], available)
        for k in local:
            share = taken * left[k] / available if available else 0.0
            quotas[host][k] = share
            left[k] -= share
        wanted[host] = amounts[host] - taken
    available = sum(left)
    for host, amount in wanted.items():
        for k in range(len(owners)):
            quotas[host][k] += amount * left[k] / available if available > 0 else 0.0
    return quotas


class Ledger:
    """What some workers send of several things in turn: keeps each one's part near its quota all along."""

    def __init__(self, quotas: Sequence[float], total: float) -> None:
        self._ratios = [quota / total for quota in quotas] if total else [0.0] * len(quotas)
        self._seen = 0
        self._given = [0.0] * len(quotas)

    def is_fine(self, num_units: int) -> bool:
        """Whether this many equal units come near enough to the quotas."""
        if len(self._ratios) == 1:
            return True
        counts = _whole_units(self._ratios, num_units)
        slack = FINE * num_units * max(self._ratios)
        return all(
            abs(ratio * num_units - count) <= slack for ratio, count in zip(self._ratios, counts, strict=True)
        )

    def ship(self, num_units: int, nbytes: int) -> tuple[int, ...]:
        """Return how many of the units of a cell each owner sends."""
        if len(self._ratios) == 1:
            return (num_units,)
        self._seen += nbytes
        due = [ratio * self._seen - given for ratio, given in zip(self._ratios, self._given, strict=True)]
        counts = _whole_units(due, num_units)
        for k, count in enumerate(counts):
            self._given[k] += nbytes * count / max(1, num_units)
        return tuple(counts)


def _whole_units(due: Sequence[float], num_units: int) -> list[int]:
    """Round what is due to each to whole units that sum to `num_units`, largest remainders first."""
    positive = [max(0.0, amount) for amount in due]
    total = sum(positive)
    if total <= 0:
        return [num_units] + [0] * (len(due) - 1)
    exact = [amount * num_units / total for amount in positive]
    counts = [int(amount + 1e-9) for amount in exact]
    by_remainder = sorted(range(len(due)), key=lambda k: (round(counts[k] - exact[k], 9), k))
    for k in by_remainder[: num_units - sum(counts)]:
        counts[k] += 1
    return counts


def spread(counts: Sequence[int]) -> list[int]:
    """Return the turn of each unit: index k `counts[k]` times, as evenly spaced as possible."""
    if len(counts) == 1:
        return [0] * counts[0]
    turns = [((2 * i + 1) / count, k) for k, count in enumerate(counts) for i in range(count)]
    return [k for _, k in sorted(turns)]
