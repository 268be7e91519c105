"""build_plan: source maps in, plan out; the passes in order, then the checks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import msgspec

from wbridge.config import Config
from wbridge.errors import PlanError
from wbridge.ids import WorkerId
from wbridge.layout.source_map import SourceMap
from wbridge.plan.balance import Balance
from wbridge.plan.cells import find_cells
from wbridge.plan.checks import check
from wbridge.plan.classes import Members, find_classes, find_members, included
from wbridge.plan.exchanges import find_exchanges
from wbridge.plan.geometry import Geometry
from wbridge.plan.receivers import Rollouts
from wbridge.plan.schedule import ALIGNMENT
from wbridge.plan.tables import Column, MapTable, tabulate
from wbridge.plan.topology import Topology, find_links, hosts_of
from wbridge.plan.types import Plan, PlannedClass, PlannedExchange, PlannedRow, PlannedTable

ANY_TOPOLOGY = Topology()


def build_plan(
    maps: Mapping[WorkerId, SourceMap],
    hosts: Mapping[WorkerId, str],
    config: Config,
    topology: Topology = ANY_TOPOLOGY,
) -> Plan:
    """Decide who sends which region to whom; the same input in any order gives the same plan.

    `hosts` names the host of every worker: workers with equal names share memory.

    Raises:
        PlanError: the two sides cannot be matched, or a slot is too small.
        LayoutError: workers disagree on a tensor's shape, or on dtypes that cannot be cast.
        CoverageError: trainers hold a needed tensor only in part.
    """
    tables = {
        id(source_map): tabulate(source_map) for source_map in {id(m): m for m in maps.values()}.values()
    }
    return plan_tables({worker: tables[id(maps[worker])] for worker in maps}, hosts, config, topology)


def plan_tables(
    tables: Mapping[WorkerId, MapTable],
    hosts: Mapping[WorkerId, str],
    config: Config,
    topology: Topology = ANY_TOPOLOGY,
) -> Plan:
    """As `build_plan`, for maps in which equal layouts are written once."""
    if config.slot_nbytes < ALIGNMENT:
        raise PlanError(f"slot_nbytes = {config.slot_nbytes}: raise it to at least {ALIGNMENT} bytes")
    members = find_members(included(tables, config.include))
    placed = hosts_of(members.workers, hosts)
    found = find_classes(members)
    geometry = Geometry()
    cells = [(c, find_cells(c, members, geometry)) for c in found.classes]
    rollouts = Rollouts(members.workers, members.table_of, placed)
    counted = [(c.num_tensors, cell) for c, own in cells for cell in own]
    exchanges: tuple[PlannedExchange, ...] = ()
    if config.relays == "auto":
        exchanges = find_exchanges(counted, members, rollouts, placed, topology)
    links = find_links(members.workers, placed, topology)
    balance = Balance(counted, members, rollouts, placed, links, exchanges)
    classes = tuple(
        PlannedClass(
            c.stems, c.layers, tuple(balance.divide(c.num_tensors, cell, geometry, config) for cell in own)
        )
        for c, own in cells
    )
    columns = tuple({id(row.column): row.column for table in members.tables for row in table.rows}.values())
    plan = Plan(
        workers=members.workers,
        hosts=placed,
        columns=columns,
        tables=_without_columns(members, columns),
        table_of=members.table_of,
        classes=classes,
        num_unused_tensors=found.num_unused,
        slot_nbytes=config.slot_nbytes,
        fingerprint="",
        exchanges=exchanges,
    )
    plan = msgspec.structs.replace(plan, fingerprint=_fingerprint(plan))
    check(plan, geometry)
    return plan


def _without_columns(members: Members, columns: Sequence[Column]) -> tuple[PlannedTable, ...]:
    numbers = {id(column): number for number, column in enumerate(columns)}
    return tuple(
        PlannedTable(
            tuple(PlannedRow(row.dtype, row.region, numbers[id(row.column)]) for row in table.rows),
            table.indivisible,
        )
        for table in members.tables
    )


def _fingerprint(plan: Plan) -> str:
    return hashlib.sha256(msgspec.msgpack.encode(plan)).hexdigest()
