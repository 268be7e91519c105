from __future__ import annotations

import msgspec
import pytest

from tests.unit.plan.world import groups_of, plan_of, rollout, rows, single, trainer
from wbridge.errors import InternalError
from wbridge.ids import WorkerId
from wbridge.layout.source_map import SourceMap
from wbridge.plan.checks import check, check_group
from wbridge.plan.geometry import Geometry

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
    maps = {trainer(0, 1): single("w", SHAPE, rows(SHAPE, 0, 1)), rollout(0, 1): empty}
    assert groups_of(plan_of(maps)) == ()


def test_checks_find_a_plan_that_loses_a_cell() -> None:
    plan = plan_of(small_maps())
    (planned,) = plan.classes
    lost = msgspec.structs.replace(planned, cells=planned.cells[:1])
    with pytest.raises(InternalError, match=r"delivers 8 elements of 'w' to row 0 .* needs 16"):
        check(msgspec.structs.replace(plan, classes=(lost,)), Geometry())


def test_checks_find_blocks_that_nobody_or_two_would_send() -> None:
    plan = plan_of(small_maps())
    (planned,) = plan.classes
    for counts in ((0,), (2,)):
        cells = (msgspec.structs.replace(planned.cells[0], counts={"host0": counts}), *planned.cells[1:])
        changed = msgspec.structs.replace(planned, cells=cells)
        with pytest.raises(InternalError, match="divides 1 blocks of 'w' for host 'host0' into"):
            check(msgspec.structs.replace(plan, classes=(changed,)), Geometry())


@pytest.mark.parametrize("how", ["overlapping", "misplaced", "large"])
def test_checks_find_a_broken_group(how: str) -> None:
    (group,) = groups_of(plan_of(small_maps()))
    first, second = group.pieces
    check_group(group, 32)
    changed = {
        "overlapping": (second, first),
        "misplaced": (first, msgspec.structs.replace(second, offset=17)),
        "large": group.pieces,
    }
    with pytest.raises(InternalError, match="please report it"):
        check_group(msgspec.structs.replace(group, pieces=changed[how]), 16 if how == "large" else 64)
