from __future__ import annotations

import msgspec
import pytest

from tests.unit.plan.world import groups_of, plan_of, rollout, rows, single, trainer
from wbridge.errors import PlanError
from wbridge.plan.expand import Expansion
from wbridge.plan.types import Plan, WorkerPlan

SHAPE = (32, 2)


def small_plan() -> Plan:
    maps = {trainer(r, 2): single("w", SHAPE, rows(SHAPE, r, 2)) for r in range(2)}
    maps |= {rollout(r, 2): single("w", SHAPE, rows(SHAPE, r, 2, 1)) for r in range(2)}
    return plan_of(maps, slot_nbytes=32)


def test_slices_hold_every_piece_once_for_its_writer_and_every_group_for_its_receiver() -> None:
    plan = small_plan()
    slices = {worker: Expansion(plan).slice_for(worker) for worker in plan.workers}
    pieces = {(g.receiver, g.index, k): p for g in groups_of(plan) for k, p in enumerate(g.pieces)}
    outgoing = {
        (o.receiver, o.group_index, o.piece_index): o.piece for part in slices.values() for o in part.outgoing
    }
    assert outgoing == pieces
    assert sum(len(part.outgoing) for part in slices.values()) == len(pieces)
    assert {worker: part.incoming for worker, part in slices.items()} == {
        worker: Expansion(plan).groups_into(worker) for worker in plan.workers
    }
    assert all(o.piece.writer == worker for worker, part in slices.items() for o in part.outgoing)


def test_a_writer_sees_its_pieces_in_group_order() -> None:
    order = [o.group_index for o in Expansion(small_plan()).slice_for(trainer(0, 2)).outgoing]
    assert order == sorted(order)


def test_plans_and_slices_survive_the_wire() -> None:
    plan = small_plan()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=Plan) == plan
    part = Expansion(plan).slice_for(rollout(1, 2))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(part), type=WorkerPlan) == part


def test_an_unknown_worker_is_named() -> None:
    with pytest.raises(PlanError, match=r"rollout/other\[0\] is not in plan"):
        Expansion(small_plan()).slice_for(rollout(0, 1, "other"))
