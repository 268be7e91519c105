"""The balance pass: which holder sends what, so that the most loaded trainer sends the least."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from wbridge.ids import WorkerId
from wbridge.layout.region import Region
from wbridge.plan.dedupe import Portion, Source
from wbridge.plan.geometry import cut

SLICE_NBYTES = 64 * 2**10
"""Portions are divided among their owners in slices of at least this many bytes."""

Owners = tuple[WorkerId, ...]


class Shipment(msgspec.Struct, frozen=True, gc=False):
    """A portion, or a slice of one, with the source that sends it."""

    portion: Portion
    region: Region
    source: Source


def balance(
    portions: Sequence[Portion], hosts: Mapping[WorkerId, str], *, slice_nbytes: int = SLICE_NBYTES
) -> tuple[Shipment, ...]:
    """Give every portion to one of its owners, or slices of it to several.

    The bytes per trainer become as equal as the holdings allow; among plans with those totals,
    owners on the receiver's host come first.
    """
    totals: dict[Owners, dict[WorkerId, int]] = {}
    for portion in portions:
        receivers = totals.setdefault(portion.owners, {})
        receiver = portion.need.receiver
        receivers[receiver] = receivers.get(receiver, 0) + portion.nbytes
    flows = level({owners: sum(receivers.values()) for owners, receivers in totals.items()})
    ledgers: dict[tuple[Owners, WorkerId], _Ledger] = {}
    for owners in sorted(totals):
        for receiver, quotas in _place(totals[owners], owners, flows[owners], hosts).items():
            ledgers[owners, receiver] = _Ledger(quotas, totals[owners][receiver])
    shipments: list[Shipment] = []
    for portion in portions:
        if len(portion.sources) == 1:
            shipments.append(Shipment(portion=portion, region=portion.region, source=portion.sources[0]))
        else:
            shipments += ledgers[portion.owners, portion.need.receiver].ship(portion, slice_nbytes)
    return tuple(shipments)


def level(totals: Mapping[Owners, int], *, num_rounds: int = 200) -> dict[Owners, list[float]]:
    """Divide the bytes of each set of owners among its members so that the loads are most equal.

    Filling one set at a time up to a common level, in turn, lowers the sum of squared loads and
    reaches its minimum, which has the least possible maximum.
    """
    flows = {owners: [0.0] * len(owners) for owners in totals}
    loads = {worker: 0.0 for owners in totals for worker in owners}
    order = sorted(totals, key=lambda owners: (len(owners), owners))
    for _ in range(num_rounds):
        moved = 0.0
        for owners in order:
            before = flows[owners]
            base = [loads[worker] - flow for worker, flow in zip(owners, before, strict=True)]
            after = _fill(base, totals[owners])
            for worker, low, flow, old in zip(owners, base, after, before, strict=True):
                loads[worker] = low + flow
                moved = max(moved, abs(flow - old))
            flows[owners] = after
        if moved < 1:
            break
    return flows


def _fill(base: Sequence[float], amount: float) -> list[float]:
    """Pour `amount` over columns that stand at `base`; return what lands on each."""
    heights = sorted(base)
    poured, surface = 0.0, heights[0]
    for count, height in enumerate(heights[1:], start=1):
        step = (height - surface) * count
        if poured + step >= amount:
            break
        poured, surface = poured + step, height
    else:
        count = len(heights)
    surface += (amount - poured) / count
    return [max(0.0, surface - height) for height in base]


def _place(
    receivers: Mapping[WorkerId, int], owners: Owners, flow: Sequence[float], hosts: Mapping[WorkerId, str]
) -> dict[WorkerId, list[float]]:
    """Divide each owner's flow among the receivers: first those on its host, then the others."""
    left = list(flow)
    quotas = {receiver: [0.0] * len(owners) for receiver in receivers}
    wanted: dict[WorkerId, float] = {}
    for receiver in sorted(receivers):
        local = [k for k, owner in enumerate(owners) if hosts[owner] == hosts[receiver]]
        available = sum(left[k] for k in local)
        taken = min(float(receivers[receiver]), available)
        for k in local:
            share = taken * left[k] / available if available else 0.0
            quotas[receiver][k] = share
            left[k] -= share
        wanted[receiver] = receivers[receiver] - taken
    available = sum(left)
    for receiver, amount in wanted.items():
        for k in range(len(owners)):
            quotas[receiver][k] += amount * left[k] / available if available > 0 else 0.0
    return quotas


class _Ledger:
    """What one receiver gets from one set of owners: keeps each owner's part near its quota all along."""

    def __init__(self, quotas: Sequence[float], total: int) -> None:
        self._ratios = [quota / total for quota in quotas] if total else [0.0] * len(quotas)
        self._seen = 0
        self._given = [0] * len(quotas)

    def ship(self, portion: Portion, slice_nbytes: int) -> list[Shipment]:
        self._seen += portion.nbytes
        due = [ratio * self._seen - given for ratio, given in zip(self._ratios, self._given, strict=True)]
        num_units = max(1, portion.nbytes // slice_nbytes)
        loop = _cut_loop(portion.region, num_units)
        extent = portion.region.extents[loop] if loop >= 0 else 1
        rows_per_unit = -(-extent // min(num_units, extent))
        num_units = -(-extent // rows_per_unit)
        shipments: list[Shipment] = []
        start = 0
        for k, count in enumerate(_whole_units(due, num_units)):
            stop = min(extent, start + count * rows_per_unit)
            if start == stop:
                continue
            whole = stop - start == extent
            region = portion.region if whole else cut(portion.region, loop, start, stop)
            self._given[k] += portion.nbytes * (stop - start) // extent
            shipments.append(Shipment(portion=portion, region=region, source=portion.sources[k]))
            start = stop
        return shipments


def _cut_loop(region: Region, num_units: int) -> int:
    """Return the loop to cut into `num_units`: long enough if there is one, and the outermost of those."""
    source = region.source.strides
    order = range(len(region.extents))
    return max(order, key=lambda k: (min(region.extents[k], num_units), abs(source[k]), -k), default=-1)


def _whole_units(due: Sequence[float], num_units: int) -> list[int]:
    """Round what is due to each to whole units that sum to `num_units`, largest remainders first."""
    positive = [max(0.0, amount) for amount in due]
    total = sum(positive)
    if total <= 0:
        return [num_units] + [0] * (len(due) - 1)
    exact = [amount * num_units / total for amount in positive]
    counts = [int(amount) for amount in exact]
    by_remainder = sorted(range(len(due)), key=lambda k: (counts[k] - exact[k], k))
    for k in by_remainder[: num_units - sum(counts)]:
        counts[k] += 1
    return counts
