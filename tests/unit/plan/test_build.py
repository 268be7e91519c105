from __future__ import annotations

import msgspec
import pytest

from tests.unit.plan.world import plan_of, rollout, rows, single, trainer
from wbridge.config import Config
from wbridge.errors import InternalError
from wbridge.ids import WorkerId
from wbridge.layout.source_map import SourceMap
from wbridge.plan.checks import check
from wbridge.plan.demand import find_demand
from wbridge.plan.types import Plan

SHAPE = (8, 2)


def small_maps() -> dict[WorkerId, SourceMap]:
    maps = {trainer(r, 2): single("w", SHAPE, rows(SHAPE, r, 2)) for r in range(2)}
    return maps | {rollout(0, 1): single("w", SHAPE, rows(SHAPE, 0, 1))}


def test_the_fingerprint_follows_the_content() -> None:
    plan = plan_of(small_maps())
    assert plan.fingerprint == plan_of(dict(reversed(small_maps().items()))).fingerprint
    assert plan.fingerprint != plan_of(small_maps(), slot_nbytes=16).fingerprint
    assert len(plan.fingerprint) == 64


def test_a_rollout_that_needs_nothing_gives_an_empty_plan() -> None:
    empty = SourceMap(checkpoint={}, parameters={}, mapped=())
    assert plan_of({trainer(0, 1): single("w", SHAPE, rows(SHAPE, 0, 1)), rollout(0, 1): empty}).groups == ()


def broken(plan: Plan, how: str) -> Plan:
    group = plan.groups[0]
    first, second = group.pieces
    changed = {
        "lost": (msgspec.structs.replace(group, pieces=(first,), nbytes=first.nbytes),),
        "twice": (group, msgspec.structs.replace(group, index=1)),
        "renumbered": (msgspec.structs.replace(group, index=1),),
        "overlapping": (msgspec.structs.replace(group, pieces=(second, first)),),
        "misplaced": (
            msgspec.structs.replace(group, pieces=(first, msgspec.structs.replace(second, offset=17))),
        ),
    }
    return msgspec.structs.replace(plan, groups=changed[how])


@pytest.mark.parametrize("how", ["lost", "twice", "renumbered", "overlapping", "misplaced"])
def test_checks_find_a_broken_plan(how: str) -> None:
    plan, demand = plan_of(small_maps()), find_demand(small_maps(), Config())
    check(plan, demand, Config())
    with pytest.raises(InternalError, match="please report it"):
        check(broken(plan, how), demand, Config())


def test_checks_find_a_group_larger_than_its_slot() -> None:
    plan, demand = plan_of(small_maps()), find_demand(small_maps(), Config())
    with pytest.raises(InternalError, match="exceeds slot_nbytes = 16"):
        check(plan, demand, Config(slot_nbytes=16))
