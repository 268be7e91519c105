"""MapTable: a source map with equal layouts written once, which is what a planner reads."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from wbridge.layout.region import Region
from wbridge.layout.source_map import SourceMap, TensorSpec
from wbridge.plan.geometry import at_origin, region_key


class Column(msgspec.Struct, frozen=True, array_like=True):
    """Checkpoint tensors in ascending order; for each the parameter that holds it and the element where
    it starts there."""

    tensors: tuple[str, ...]
    parameters: tuple[str, ...]
    offsets: tuple[int, ...]


class Row(msgspec.Struct, frozen=True, array_like=True):
    """Tensors of one shape that parameters of one dtype hold by the same region (target offset 0)."""

    shape: tuple[int, ...]
    dtype: str
    region: Region
    column: Column


class MapTable(msgspec.Struct, frozen=True):
    """What one worker holds or needs; as long as its layouts are many, not its tensors.

    `indivisible` lists sets of tensors that the loader needs in one call.
    """

    rows: tuple[Row, ...]
    indivisible: tuple[tuple[str, ...], ...] = ()


def tabulate(source_map: SourceMap) -> MapTable:
    """Return the same map with tensors of equal layout in one row; the order of its input is forgotten."""
    found: dict[tuple[TensorSpec, str, Region], dict[str, list[tuple[str, int]]]] = {}
    for mapped in source_map.mapped:
        region = mapped.region
        key = (
            source_map.checkpoint[mapped.tensor],
            source_map.parameters[mapped.parameter].dtype,
            at_origin(region),
        )
        places = found.setdefault(key, {}).setdefault(mapped.tensor, [])
        places.append((mapped.parameter, region.target.offset))
    rows: list[Row] = []
    for (spec, dtype, region), by_tensor in found.items():
        ordered = [(tensor, sorted(places)) for tensor, places in sorted(by_tensor.items())]
        for turn in range(max(len(places) for _, places in ordered)):
            of_turn = [(tensor, *places[turn]) for tensor, places in ordered if turn < len(places)]
            tensors, parameters, offsets = zip(*of_turn, strict=True)
            rows.append(Row(spec.shape, dtype, region, Column(tensors, parameters, offsets)))
    indivisible = (*source_map.atomic, *(target.tensors for target in source_map.opaque))
    return table_of(rows, indivisible)


def table_of(rows: Iterable[Row], indivisible: Iterable[tuple[str, ...]] = ()) -> MapTable:
    """Put rows and sets in the order that makes equal maps equal tables."""
    return MapTable(
        rows=tuple(sorted(rows, key=_row_key)),
        indivisible=tuple(sorted({tuple(sorted(tensors)) for tensors in indivisible})),
    )


def _row_key(row: Row) -> tuple[object, ...]:
    column = row.column
    return *region_key(row.region), row.shape, row.dtype, column.tensors[0], column.parameters, column.offsets
