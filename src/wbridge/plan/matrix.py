"""matrix: who sends how much to whom, by worker, host or group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import msgspec

from wbridge.plan.types import Plan

Axis = Literal["worker", "host", "group"]

MOST_WORKERS = 32
"""A matrix with more rows or columns than this is by host."""


class Matrix(msgspec.Struct, frozen=True):
    """Bytes of one version: `nbytes[row][column]` go from the writers `rows` to the receivers `columns`."""

    by: Axis
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    nbytes: tuple[tuple[int, ...], ...]

    @property
    def largest(self) -> int:
        return max((n for row in self.nbytes for n in row), default=0)


def find_matrix(plan: Plan, pairs: Mapping[tuple[int, int], int], by: Axis | None = None) -> Matrix:
    """Sum bytes by (writer, receiver); without `by`, of workers, or of hosts if those are too many."""
    if by is None:
        most = max(len({writer for writer, _ in pairs}), len({receiver for _, receiver in pairs}))
        by = "worker" if most <= MOST_WORKERS else "host"
    name = _namer(plan, by)
    writers = list(dict.fromkeys(name(writer) for writer, _ in sorted(pairs)))
    receivers = list(dict.fromkeys(name(k) for k in sorted({receiver for _, receiver in pairs})))
    row_of = {writer: place for place, writer in enumerate(writers)}
    column_of = {receiver: place for place, receiver in enumerate(receivers)}
    cells = [[0] * len(receivers) for _ in writers]
    for (writer, receiver), nbytes in pairs.items():
        cells[row_of[name(writer)]][column_of[name(receiver)]] += nbytes
    return Matrix(by, tuple(writers), tuple(receivers), tuple(map(tuple, cells)))


def _namer(plan: Plan, by: Axis) -> Callable[[int], str]:
    if by == "host":
        return lambda k: plan.hosts[k]
    if by == "group":
        return lambda k: f"{plan.workers[k].role}/{plan.workers[k].group}"
    return lambda k: str(plan.workers[k])
