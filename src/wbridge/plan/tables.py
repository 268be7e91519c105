"""MapTable: a source map with equal layouts written once, which is what a planner reads."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator

import msgspec

from wbridge.errors import LayoutError
from wbridge.layout.region import Region
from wbridge.layout.source_map import SourceMap
from wbridge.plan.geometry import at_origin, region_key

NO_LAYER = -1
"""The layer of a name without a number: it is its own stem."""

_NUMBER = re.compile(r"(?<![^.])(0|[1-9][0-9]{0,8})(?![^.])")
"""A part of a name that is a number, as `str` would write it, and not too long for the wire."""


class Column(msgspec.Struct, frozen=True, array_like=True):
    """The tensors `stem` of each layer, layer by layer; the parameter that holds each, and where it starts.

    Stems are in ascending order, and so are layers. The layers of parameters count from `shift` on.
    """

    stems: tuple[str, ...]
    parameters: tuple[str, ...]
    offsets: tuple[int, ...]
    layers: tuple[int, ...]
    shift: int = 0

    def __post_init__(self) -> None:
        if not len(self.stems) == len(self.parameters) == len(self.offsets):
            raise LayoutError(
                f"a column pairs {len(self.stems)} tensors with {len(self.parameters)} parameters and"
                f" {len(self.offsets)} offsets; run one release everywhere"
            )

    def places(self, stems: Iterable[str], layers: Iterable[int]) -> list[tuple[str, int]]:
        """Return the parameter and offset of these of its tensors, layer by layer."""
        index = {stem: k for k, stem in enumerate(self.stems)}
        chosen = [index[stem] for stem in stems]
        names = names_of((self.parameters[k] for k in chosen), (layer + self.shift for layer in layers))
        return list(zip(names, itertools.cycle([self.offsets[k] for k in chosen]), strict=False))


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
    found: dict[tuple[tuple[int, ...], str, Region], dict[str, list[tuple[str, int]]]] = {}
    for mapped in source_map.mapped:
        region = mapped.region
        shape = source_map.checkpoint[mapped.tensor].shape
        key = (shape, source_map.parameters[mapped.parameter].dtype, at_origin(region))
        places = found.setdefault(key, {}).setdefault(mapped.tensor, [])
        places.append((mapped.parameter, region.target.offset))
    rows: list[Row] = []
    for (shape, dtype, region), by_tensor in found.items():
        ordered = [(tensor, sorted(places)) for tensor, places in sorted(by_tensor.items())]
        for turn in range(max(len(places) for _, places in ordered)):
            of_turn = [(tensor, *places[turn]) for tensor, places in ordered if turn < len(places)]
            rows += [Row(shape, dtype, region, column) for column in columns_of(of_turn)]
    indivisible = (*source_map.atomic, *(target.tensors for target in source_map.opaque))
    return table_of(rows, indivisible)


def table_of(rows: Iterable[Row], indivisible: Iterable[tuple[str, ...]] = ()) -> MapTable:
    """Put rows and sets in the order that makes equal maps equal tables."""
    return MapTable(
        rows=tuple(sorted(rows, key=_row_key)),
        indivisible=tuple(sorted({tuple(sorted(tensors)) for tensors in indivisible})),
    )


def columns_of(places: Iterable[tuple[str, str, int]]) -> Iterator[Column]:
    """Divide different tensors, each with its parameter and offset there, into columns of equal layers."""
    layers_of: dict[tuple[str, str, int, int], list[int]] = {}
    for tensor, parameter, offset in places:
        stem, layer = stem_of(tensor)
        held, number = stem_of(parameter)
        if NO_LAYER in (layer, number):
            held, number = parameter, layer  # the layer does not change its name
        layers_of.setdefault((stem, held, offset, number - layer), []).append(layer)
    alike: dict[tuple[tuple[int, ...], int], list[tuple[str, str, int]]] = {}
    for (stem, held, offset, shift), layers in layers_of.items():
        alike.setdefault((tuple(sorted(layers)), shift), []).append((stem, held, offset))
    for (of_all, shift), found in alike.items():
        stems, parameters, offsets = zip(*sorted(found), strict=True)
        yield Column(stems, parameters, offsets, of_all, shift)


def restricted(table: MapTable, includes: Callable[[str], bool]) -> MapTable:
    """Return the rows of a table without the tensors that are not included."""
    rows: list[Row] = []
    for row in table.rows:
        column = row.column
        places = zip(
            names_of(column.stems, column.layers), column.places(column.stems, column.layers), strict=True
        )
        kept = [(tensor, *place) for tensor, place in places if includes(tensor)]
        rows += [Row(row.shape, row.dtype, row.region, part) for part in columns_of(kept)]
    return table_of(rows, table.indivisible)


def stem_of(name: str) -> tuple[str, int]:
    """Return a name with 0 for its first number, and the number: `h.3.w` is `h.0.w` of layer 3."""
    found = _NUMBER.search(name)
    if found is None:
        return name, NO_LAYER
    return f"{name[: found.start()]}0{name[found.end() :]}", int(found[0])


def name_of(stem: str, layer: int) -> str:
    return names_of((stem,), (layer,))[0]


def names_of(stems: Iterable[str], layers: Iterable[int]) -> list[str]:
    """Return the names of stems, layer by layer; one without a layer, or without a number, is its stem."""
    parts = [_NUMBER.split(stem, maxsplit=1) for stem in stems]
    return [
        "".join(part) if layer < 0 or len(part) == 1 else f"{part[0]}{layer}{part[2]}"
        for layer in layers
        for part in parts
    ]


def _row_key(row: Row) -> tuple[object, ...]:
    return *region_key(row.region), row.shape, row.dtype, msgspec.structs.astuple(row.column)
