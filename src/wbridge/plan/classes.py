"""The first pass: which tensors are alike on every worker, and who holds and who needs them.

Tensors of one class occur in the same rows of all tables: whatever is decided for one holds for all. Equal
layers and experts fall into one class, and equal workers share a table.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from wbridge.errors import LayoutError, PlanError
from wbridge.ids import WorkerId
from wbridge.layout.region import Region
from wbridge.plan.geometry import distinct
from wbridge.plan.tables import Column, MapTable, Row, name_of, names_of, restricted
from wbridge.plan.types import Place

_Item = TypeVar("_Item", str, int)


class Members(msgspec.Struct, frozen=True):
    """All workers in ascending order, and the distinct ones among their tables."""

    workers: tuple[WorkerId, ...]
    tables: tuple[MapTable, ...]
    table_of: tuple[int, ...]
    """The index of each worker's table."""

    def row(self, place: Place) -> Row:
        return self.tables[place[0]].rows[place[1]]

    def of_table(self, role: str) -> list[list[int]]:
        """Return for each table the indices of the workers of a role that have it."""
        found: list[list[int]] = [[] for _ in self.tables]
        for index, table in enumerate(self.table_of):
            if self.workers[index].role == role:
                found[table].append(index)
        return found


class TensorClass(msgspec.Struct, frozen=True):
    """Tensors that are alike everywhere: the trainers' rows that hold them, the rollouts' that need them."""

    stems: tuple[str, ...]
    layers: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    """Of the trainers' parameters."""
    held: tuple[Place, ...]
    needed: tuple[Place, ...]

    @property
    def num_tensors(self) -> int:
        return len(self.stems) * len(self.layers)

    @property
    def first(self) -> str:
        """The name of one of them."""
        return name_of(self.stems[0], self.layers[0])


class Classes(msgspec.Struct, frozen=True):
    """All tensors that rollouts need, by class in the order of their first names."""

    classes: tuple[TensorClass, ...]
    num_unused: int
    """Tensors that trainers hold and no rollout needs."""


def find_members(tables: Mapping[WorkerId, MapTable]) -> Members:
    """Find the distinct tables of a fleet, whether or not equal ones are one object.

    Raises:
        PlanError: a role is absent.
    """
    workers = tuple(sorted(tables))
    for role in ("trainer", "rollout"):
        if not any(worker.role == role for worker in workers):
            raise PlanError(f"no {role} has reported a source map; a plan needs at least one of each role")
    numbers = _Numbers()
    by_object: dict[int, int] = {}
    by_content: dict[object, int] = {}
    found: list[MapTable] = []
    for worker in workers:
        table = tables[worker]
        if id(table) in by_object:
            continue
        content = tuple(numbers.of_row(row) for row in table.rows), table.indivisible
        if content not in by_content:
            by_content[content] = len(found)
            rows = tuple(msgspec.structs.replace(row, column=numbers.same(row.column)) for row in table.rows)
            found.append(MapTable(rows, table.indivisible))
        by_object[id(table)] = by_content[content]
    return Members(workers, tuple(found), tuple(by_object[id(tables[worker])] for worker in workers))


class _Numbers:
    """Gives equal regions and columns equal numbers; one object is compared once."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        self._numbers: dict[object, int] = {}
        self._columns: dict[int, Column] = {}

    def of_row(self, row: Row) -> tuple[object, ...]:
        return row.shape, row.dtype, self._of(row.region), self._of(row.column)

    def same(self, column: Column) -> Column:
        """Return the first column that is equal to this one."""
        return self._columns.setdefault(self._of(column), column)

    def _of(self, value: object) -> int:
        number = self._known.get(id(value))
        if number is None:
            number = self._known[id(value)] = self._numbers.setdefault(value, len(self._numbers))
        return number


def find_classes(members: Members) -> Classes:
    """Divide the tensors that rollouts need into classes.

    Raises:
        PlanError: no trainer has a needed tensor.
        LayoutError: two workers disagree on a tensor's shape, or on a dtype that cannot be cast.
    """
    trainers, rollouts = members.of_table("trainer"), members.of_table("rollout")
    held: dict[_Alike, list[Place]] = {}
    needed: dict[_Alike, list[Place]] = {}
    occurring = _occurring([row.column for table in members.tables for row in table.rows])
    for t, table in enumerate(members.tables):
        for r, row in enumerate(table.rows):
            for alike in occurring[id(row.column)]:
                if trainers[t]:
                    held.setdefault(alike, []).append((t, r))
                if rollouts[t]:
                    needed.setdefault(alike, []).append((t, r))
    if needed.keys() - held.keys():
        raise PlanError(_unmatched(members, held, needed))
    found = [
        _class(members, alike, held[alike], needed[alike])
        for alike in sorted(needed, key=lambda alike: (alike[0][0], alike[1]))
    ]
    return Classes(tuple(found), sum(len(s) * len(n) for s, n in held.keys() - needed.keys()))


_Alike = tuple[tuple[str, ...], tuple[int, ...]]
"""Stems and layers of tensors that exactly the same columns contain."""


def _occurring(columns: Iterable[Column]) -> dict[int, list[_Alike]]:
    """Return what each column (by id) contains, as parts that no column contains only partly."""
    by_id = {id(column): column for column in columns}
    stem_sets = {id(column.stems): column.stems for column in by_id.values()}
    number_of = _refine(tuple(dict.fromkeys(stem_sets.values())))
    parts = {s: tuple(dict.fromkeys(number_of[stem] for stem in stems)) for s, stems in stem_sets.items()}
    stems_of: dict[int, list[str]] = {}
    for stem in sorted(number_of):
        stems_of.setdefault(number_of[stem], []).append(stem)
    layer_sets: dict[int, dict[tuple[int, ...], None]] = {}
    for column in by_id.values():
        for number in parts[id(column.stems)]:
            layer_sets.setdefault(number, {})[column.layers] = None
    divided: dict[tuple[tuple[int, ...], ...], dict[tuple[int, ...], list[tuple[int, ...]]]] = {}
    found: dict[int, list[_Alike]] = {key: [] for key in by_id}
    stems_in = {number: tuple(stems) for number, stems in stems_of.items()}
    for key, column in by_id.items():
        for number in parts[id(column.stems)]:
            sets = tuple(sorted(layer_sets[number]))
            if sets not in divided:
                divided[sets] = _layers_in(sets)
            found[key] += [(stems_in[number], layers) for layers in divided[sets][column.layers]]
    return found


def _layers_in(sets: tuple[tuple[int, ...], ...]) -> dict[tuple[int, ...], list[tuple[int, ...]]]:
    """Divide the layers of each set so that no set contains a part of them only partly."""
    number_of = _refine(sets)
    layers_of: dict[int, list[int]] = {}
    for layer in sorted(number_of):
        layers_of.setdefault(number_of[layer], []).append(layer)
    return {
        layers: [tuple(layers_of[number]) for number in dict.fromkeys(number_of[layer] for layer in layers)]
        for layers in sets
    }


def _refine(sets: Iterable[tuple[_Item, ...]]) -> dict[_Item, int]:
    """Number items so that two have one number if exactly the same sets hold them."""
    number_of: dict[_Item, int] = {}
    next_number = 1
    for items in sets:
        parts: dict[int, int] = {}
        for item in items:
            before = number_of.get(item, 0)
            if before not in parts:
                parts[before] = next_number
                next_number += 1
            number_of[item] = parts[before]
    return number_of


def included(tables: Mapping[WorkerId, MapTable], patterns: tuple[str, ...]) -> Mapping[WorkerId, MapTable]:
    """Leave out the tensors that no pattern matches; without patterns, none.

    Raises:
        PlanError: a set that a loader needs in one call would be divided, or nothing is left.
    """
    if not patterns:
        return tables
    matches = re.compile("|".join(fnmatch.translate(pattern) for pattern in patterns)).match
    known: dict[int, MapTable] = {}
    for worker in sorted(tables):
        table = tables[worker]
        if id(table) in known:
            continue
        for tensors in table.indivisible if worker.role == "rollout" else ():
            chosen = [tensor for tensor in tensors if matches(tensor)]
            if chosen and len(chosen) < len(tensors):
                left_out = next(tensor for tensor in tensors if not matches(tensor))
                raise PlanError(
                    f"{worker}: the loader needs {len(tensors)} tensors in one call, but include has"
                    f" {chosen[0]!r} and not {left_out!r}; include all of them or none"
                )
        known[id(table)] = restricted(table, lambda tensor: matches(tensor) is not None)
    rollouts = [tables[worker] for worker in tables if worker.role == "rollout"]
    if any(table.rows for table in rollouts) and not any(known[id(table)].rows for table in rollouts):
        raise PlanError(f"include = {patterns} matches no checkpoint tensor that a rollout needs")
    return {worker: known[id(table)] for worker, table in tables.items()}


def _class(members: Members, alike: _Alike, held: Sequence[Place], needed: Sequence[Place]) -> TensorClass:
    stems, layers = alike
    name, first = name_of(stems[0], layers[0]), members.row(held[0])
    for place in held[1:]:
        row = members.row(place)
        if row.shape != first.shape:
            raise LayoutError(_shapes_differ(members, name, held[0], place))
        if row.dtype != first.dtype:
            raise LayoutError(
                f"{name!r} is {first.dtype} on {_who(members, held[0])} but {row.dtype} on"
                f" {_who(members, place)}; keep one dtype on all trainers"
            )
    for place in needed:
        row = members.row(place)
        if row.shape != first.shape:
            raise LayoutError(_shapes_differ(members, name, held[0], place, "rollout"))
        if row.dtype != first.dtype and not all("float" in dtype for dtype in (row.dtype, first.dtype)):
            raise LayoutError(
                f"{name!r} is {first.dtype} in {_parameter(first, alike)!r} of"
                f" {_who(members, held[0])} but {row.dtype} in {_parameter(row, alike)!r} of"
                f" {_who(members, place, 'rollout')}; only float types are cast, so make the two equal"
            )
    return TensorClass(stems, layers, first.shape, first.dtype, tuple(held), tuple(needed))


def needed_region(region: Region) -> Region:
    """Return what a row of this region needs, each element once."""
    return distinct(region)[0]


def _who(members: Members, place: Place, role: str = "trainer") -> WorkerId:
    return members.workers[members.of_table(role)[place[0]][0]]


def _parameter(row: Row, alike: _Alike) -> str:
    return row.column.places(alike[0][:1], alike[1][:1])[0][0]


def _shapes_differ(members: Members, tensor: str, left: Place, right: Place, role: str = "trainer") -> str:
    return (
        f"{tensor!r} has global shape {members.row(left).shape} on {_who(members, left)} but"
        f" {members.row(right).shape} on {_who(members, right, role)};"
        " both must describe the whole checkpoint tensor, without padding and before sharding"
    )


def _unmatched(
    members: Members, held: Mapping[_Alike, Sequence[Place]], needed: Mapping[_Alike, Sequence[Place]]
) -> str:
    def names(found: Iterable[_Alike]) -> list[str]:
        return sorted(name for stems, layers in found for name in names_of(stems, layers))

    lacking = needed.keys() - held.keys()
    missing, spare = names(lacking), names(held.keys() - needed.keys())
    place = next(needed[alike][0] for alike in lacking if missing[0] in names([alike]))
    return (
        f"no trainer has {len(missing)} of the {len(names(needed))} tensors that rollouts need:"
        f" {_some(missing)} (the first is needed by {_who(members, place, 'rollout')}); of"
        f" {len(names(held))} tensors that trainers hold, {len(spare)} are needed by no rollout:"
        f" {_some(spare)}. Map the names of one side to the other's, or leave tensors out with `include`"
    )


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "none"
