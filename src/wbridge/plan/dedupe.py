"""The dedupe pass: every needed element once, with all the trainers that could send it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from wbridge.errors import CoverageError
from wbridge.ids import WorkerId
from wbridge.layout.dtype import itemsize, wire_dtype
from wbridge.layout.region import Region
from wbridge.plan.demand import Demand, Holding, Need, Supply
from wbridge.plan.geometry import Cell, Geometry


class Source(msgspec.Struct, frozen=True, gc=False):
    """One way to send a cell: the holding and the shape of what is held there."""

    holding: Holding
    region: Region


class Portion(msgspec.Struct, frozen=True, gc=False):
    """Elements of one need that the same trainers hold; exactly one of `sources` sends each."""

    need: Need
    region: Region
    wire_dtype: str
    nbytes: int
    owners: tuple[WorkerId, ...]
    sources: tuple[Source, ...]
    """One for each of `owners`."""


def find_portions(demand: Demand, geometry: Geometry) -> tuple[Portion, ...]:
    """Divide each need into disjoint portions by who holds them.

    Raises:
        CoverageError: trainers hold a needed tensor only in part.
    """
    sources: dict[str, _Sources] = {}
    portions: list[Portion] = []
    for need in demand.needs:
        known = sources.setdefault(need.tensor, {})
        portions += _portions(need, demand.supplies[need.tensor], geometry, known)
    return tuple(portions)


_Sources = dict[tuple[int, ...], tuple[tuple[WorkerId, ...], tuple[Source, ...]]]
"""Owners and their sources, by the holders of a cell."""


def _portions(need: Need, supply: Supply, geometry: Geometry, known: _Sources) -> Iterator[Portion]:
    cells = geometry.cells(need.region, supply.regions)
    dtype = wire_dtype(supply.dtype, need.dtype)
    element_nbytes = itemsize(dtype)
    for cell in cells:
        if not cell.holders:
            raise CoverageError(_partly_held(need, supply, [cell for cell in cells if not cell.holders]))
        if cell.holders not in known:
            known[cell.holders] = _sources(supply, cell.holders)
        owners, sources = known[cell.holders]
        yield Portion(
            need=need,
            region=cell.region,
            wire_dtype=dtype,
            nbytes=cell.region.num_elements * element_nbytes,
            owners=owners,
            sources=sources,
        )


def _sources(supply: Supply, holders: tuple[int, ...]) -> tuple[tuple[WorkerId, ...], tuple[Source, ...]]:
    """Return one source for each worker, in the workers' order; aliases inside a worker are dropped."""
    chosen: dict[WorkerId, Source] = {}
    for index in holders:
        for holding in supply.holdings[index]:
            chosen.setdefault(holding.worker, Source(holding=holding, region=supply.regions[index]))
    owners = tuple(sorted(chosen))
    return owners, tuple(chosen[worker] for worker in owners)


def _partly_held(need: Need, supply: Supply, missing: Sequence[Cell]) -> str:
    num_missing = sum(cell.region.num_elements for cell in missing)
    left, index = missing[0].region.source.offset, []
    for extent in reversed(supply.spec.shape):
        left, position = divmod(left, extent)
        index.append(position)
    holders = sorted({holding.worker for holdings in supply.holdings for holding in holdings})
    return (
        f"{need.receiver}: parameter {need.parameter!r} needs {need.region.num_elements} elements of"
        f" {need.tensor!r} {list(supply.spec.shape)} and no trainer holds {num_missing} of them,"
        f" such as the one at {index[::-1]}; {len(holders)} trainers hold parts, the first {holders[0]}."
        " Let the missing trainer connect, or correct the shards it reports"
    )
