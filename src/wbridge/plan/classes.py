"""The first pass: which tensors are alike on every worker, and who holds and who needs them.

Tensors of one class occur in the same rows of all tables: whatever is decided for one holds for all. Equal
layers and experts fall into one class, and equal workers share a table.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence

import msgspec

from wbridge.errors import LayoutError, PlanError
from wbridge.ids import WorkerId
from wbridge.layout.region import Region
from wbridge.plan.geometry import distinct
from wbridge.plan.tables import Column, MapTable, Row
from wbridge.plan.types import Place


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

    tensors: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    """Of the trainers' parameters."""
    held: tuple[Place, ...]
    needed: tuple[Place, ...]


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


def find_classes(members: Members, include: tuple[str, ...]) -> Classes:
    """Divide the tensors that rollouts need into classes.

    Raises:
        PlanError: a pattern matches nothing or divides a set, or no trainer has a needed tensor.
        LayoutError: two workers disagree on a tensor's shape, or on a dtype that cannot be cast.
    """
    included = _Included(include)
    trainers, rollouts = members.of_table("trainer"), members.of_table("rollout")
    _check_sets(members, rollouts, included)
    sets = _name_sets(members, included)
    class_of = _refine(sets)
    held: dict[int, list[Place]] = {}
    needed: dict[int, list[Place]] = {}
    occurring = {number: tuple(dict.fromkeys(class_of[n] for n in names)) for number, names in sets.items()}
    for t, table in enumerate(members.tables):
        for r, row in enumerate(table.rows):
            for number in occurring[id(row.column.tensors)]:
                if trainers[t]:
                    held.setdefault(number, []).append((t, r))
                if rollouts[t]:
                    needed.setdefault(number, []).append((t, r))
    if not needed and include and any(members.tables[t].rows for t, own in enumerate(rollouts) if own):
        raise PlanError(f"include = {include} matches no checkpoint tensor that a rollout needs")
    names_of: dict[int, list[str]] = {}
    for name in sorted(class_of):
        names_of.setdefault(class_of[name], []).append(name)
    if needed.keys() - held.keys():
        raise PlanError(_unmatched(members, names_of, held, needed))
    found = [
        _class(members, tuple(names), held[number], needed[number])
        for number, names in names_of.items()
        if number in needed
    ]
    num_unused = sum(len(names_of[number]) for number in held.keys() - needed.keys())
    return Classes(tuple(found), num_unused)


class _Included:
    """The set of checkpoint tensors that some `include` pattern matches."""

    def __init__(self, patterns: tuple[str, ...]) -> None:
        joined = "|".join(fnmatch.translate(pattern) for pattern in patterns)
        self._matches = re.compile(joined).match if patterns else None

    def __contains__(self, tensor: str) -> bool:
        return self._matches is None or self._matches(tensor) is not None


def _check_sets(members: Members, rollouts: Sequence[Sequence[int]], included: _Included) -> None:
    for t, own in enumerate(rollouts):
        for tensors in members.tables[t].indivisible if own else ():
            chosen = [tensor for tensor in tensors if tensor in included]
            if chosen and len(chosen) < len(tensors):
                left_out = next(tensor for tensor in tensors if tensor not in included)
                raise PlanError(
                    f"{members.workers[own[0]]}: the loader needs {len(tensors)} tensors in one call, but"
                    f" include has {chosen[0]!r} and not {left_out!r}; include all of them or none"
                )


def _name_sets(members: Members, included: _Included) -> dict[int, tuple[str, ...]]:
    """Return for the id of each row's `tensors` those included; equal ones are one object."""
    known: dict[tuple[str, ...], tuple[str, ...]] = {}
    sets: dict[int, tuple[str, ...]] = {}
    for table in members.tables:
        for row in table.rows:
            tensors = row.column.tensors
            if id(tensors) not in sets:
                same = known.setdefault(tensors, tensors)
                if same is tensors:
                    sets[id(tensors)] = tuple(tensor for tensor in tensors if tensor in included)
                else:
                    sets[id(tensors)] = sets[id(same)]
    return sets


def _refine(sets: Mapping[int, tuple[str, ...]]) -> dict[str, int]:
    """Number tensors so that two have one number if exactly the same sets hold them."""
    class_of: dict[str, int] = {}
    next_number = 1
    for names in {id(names): names for names in sets.values()}.values():
        parts: dict[int, int] = {}
        for name in names:
            before = class_of.get(name, 0)
            if before not in parts:
                parts[before] = next_number
                next_number += 1
            class_of[name] = parts[before]
    return class_of


def _class(
    members: Members, names: tuple[str, ...], held: Sequence[Place], needed: Sequence[Place]
) -> TensorClass:
    first = members.row(held[0])
    for place in held[1:]:
        row = members.row(place)
        if row.shape != first.shape:
            raise LayoutError(_shapes_differ(members, names[0], held[0], place))
        if row.dtype != first.dtype:
            raise LayoutError(
                f"{names[0]!r} is {first.dtype} on {_who(members, held[0])} but {row.dtype} on"
                f" {_who(members, place)}; keep one dtype on all trainers"
            )
    for place in needed:
        row = members.row(place)
        if row.shape != first.shape:
            raise LayoutError(_shapes_differ(members, names[0], held[0], place, "rollout"))
        if row.dtype != first.dtype and not all("float" in dtype for dtype in (row.dtype, first.dtype)):
            raise LayoutError(
                f"{names[0]!r} is {first.dtype} in {_parameter(first, names[0])!r} of"
                f" {_who(members, held[0])} but {row.dtype} in {_parameter(row, names[0])!r} of"
                f" {_who(members, place, 'rollout')}; only float types are cast, so make the two equal"
            )
    return TensorClass(names, first.shape, first.dtype, tuple(held), tuple(needed))


def needed_region(region: Region) -> Region:
    """Return what a row of this region needs, each element once."""
    return distinct(region)[0]


def _who(members: Members, place: Place, role: str = "trainer") -> WorkerId:
    return members.workers[members.of_table(role)[place[0]][0]]


def _parameter(row: Row, tensor: str) -> str:
    return row.column.parameters[row.column.tensors.index(tensor)]


def _shapes_differ(members: Members, tensor: str, left: Place, right: Place, role: str = "trainer") -> str:
    return (
        f"{tensor!r} has global shape {members.row(left).shape} on {_who(members, left)} but"
        f" {members.row(right).shape} on {_who(members, right, role)};"
        " both must describe the whole checkpoint tensor, without padding and before sharding"
    )


def _unmatched(
    members: Members,
    names_of: Mapping[int, Sequence[str]],
    held: Mapping[int, Sequence[Place]],
    needed: Mapping[int, Sequence[Place]],
) -> str:
    lacking = needed.keys() - held.keys()
    missing = sorted(name for number in lacking for name in names_of[number])
    spare = sorted(name for number in held.keys() - needed.keys() for name in names_of[number])
    place = next(places[0] for number, places in needed.items() if missing[0] in names_of[number])
    return (
        f"no trainer has {len(missing)} of the {sum(len(names_of[n]) for n in needed)} tensors that rollouts"
        f" need: {_some(missing)} (the first is needed by {_who(members, place, 'rollout')}); of"
        f" {sum(len(names_of[n]) for n in held)} tensors that trainers hold, {len(spare)} are needed by no"
        f" rollout: {_some(spare)}."
        " Map the names of one side to the other's, or leave tensors out with `include`"
    )


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "none"
