"""build_plan: source maps in, plan out; the passes in order, then the checks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec

from wbridge.config import Config
from wbridge.errors import PlanError
from wbridge.ids import WorkerId
from wbridge.layout.source_map import SourceMap
from wbridge.plan.balance import balance
from wbridge.plan.checks import check
from wbridge.plan.dedupe import find_portions
from wbridge.plan.demand import find_demand
from wbridge.plan.geometry import Geometry
from wbridge.plan.schedule import schedule
from wbridge.plan.types import Group, Plan


def build_plan(maps: Mapping[WorkerId, SourceMap], hosts: Mapping[WorkerId, str], config: Config) -> Plan:
    """Decide who sends which region to whom; the same input in any order gives the same plan.

    `hosts` names the host of every worker: workers with equal names share memory.

    Raises:
        PlanError: the two sides cannot be matched, or a slot is too small.
        LayoutError: workers disagree on a tensor's shape, or on dtypes that cannot be cast.
        CoverageError: trainers hold a needed tensor only in part.
    """
    if homeless := sorted(worker for worker in maps if worker not in hosts):
        raise PlanError(
            f"{homeless[0]} and {len(homeless) - 1} other workers have no host; pass one for each"
        )
    geometry = Geometry()
    demand = find_demand(maps, config)
    shipments = balance(find_portions(demand, geometry), hosts)
    atomic = {
        worker: [*source_map.atomic, *(target.tensors for target in source_map.opaque)]
        for worker, source_map in maps.items()
    }
    groups = schedule(shipments, config, geometry, atomic=atomic)
    workers = tuple(sorted(maps))
    plan = Plan(workers=workers, groups=groups, fingerprint=_fingerprint(workers, groups))
    check(plan, demand, config)
    return plan


def _fingerprint(workers: tuple[WorkerId, ...], groups: tuple[Group, ...]) -> str:
    return hashlib.sha256(msgspec.msgpack.encode((workers, groups))).hexdigest()
