from __future__ import annotations

import pytest

from tests.unit.plan.world import (
    MapBuilder,
    egress,
    execute,
    expected,
    groups_of,
    plan_of,
    rollout,
    rows,
    single,
    trainer,
)
from wbridge.config import Config
from wbridge.plan.balance import SLICE_NBYTES
from wbridge.plan.build import build_plan
from wbridge.plan.types import Plan

LARGE = (1024, 512)  # 1 MiB
WHOLE = ((0, 1024), (0, 512))


def links(plan: Plan) -> dict[tuple[int, int], int]:
    """Return bytes by (trainer rank, rollout rank)."""
    sent: dict[tuple[int, int], int] = {}
    for group in groups_of(plan):
        for piece in group.pieces:
            key = (piece.writer.rank, group.receiver.rank)
            sent[key] = sent.get(key, 0) + piece.nbytes
    return sent


def test_replicas_divide_a_large_tensor_into_slices() -> None:
    maps = {trainer(r, 4): single("w", LARGE, WHOLE) for r in range(4)} | {
        rollout(0, 1): single("w", LARGE, WHOLE)
    }
    plan = plan_of(maps)
    assert set(egress(plan).values()) == {2**18}
    assert len(groups_of(plan)[0].pieces) == 4


def test_small_tensors_stay_whole_and_alternate() -> None:
    sender, receiver = MapBuilder(), MapBuilder()
    for k in range(10):
        sender.whole(f"norm{k}", (8,))
        receiver.whole(f"norm{k}", (8,))
    maps = {trainer(r, 2): sender.build() for r in range(2)} | {rollout(0, 1): receiver.build()}
    plan = plan_of(maps)
    assert set(egress(plan).values()) == {80}
    assert sum(len(piece.transfers) for group in groups_of(plan) for piece in group.pieces) == 10
    assert execute(plan, maps) == expected(maps)


def test_slices_are_not_smaller_than_the_least() -> None:
    shape = (3 * SLICE_NBYTES // 4, 2)  # three times the least slice
    maps = {trainer(r, 8): single("w", shape, ((0, shape[0]), (0, 2))) for r in range(8)}
    maps[rollout(0, 1)] = single("w", shape, ((0, shape[0]), (0, 2)))
    assert sorted(egress(plan_of(maps)).values()) == [0] * 5 + [SLICE_NBYTES] * 3


def test_a_partial_copy_takes_what_the_full_copy_need_not_send() -> None:
    maps = {
        trainer(0, 2): single("w", LARGE, WHOLE),
        trainer(1, 2): single("w", LARGE, rows(LARGE, 0, 2)),
        rollout(0, 1): single("w", LARGE, WHOLE),
    }
    assert set(egress(plan_of(maps)).values()) == {2**19}


def test_what_only_one_trainer_holds_is_made_up_for_by_the_others() -> None:
    sender = MapBuilder().whole("shared", LARGE)
    maps = {
        trainer(0, 2): sender.build(),
        trainer(1, 2): sender.whole("own", (256, 512)).build(),
        rollout(0, 1): MapBuilder().whole("shared", LARGE).whole("own", (256, 512)).build(),
    }
    sent = egress(plan_of(maps))
    assert sent[trainer(0, 2)] == pytest.approx(sent[trainer(1, 2)], rel=0.01)


def test_a_holder_on_the_receivers_host_is_preferred_when_the_load_stays_equal() -> None:
    maps = {trainer(r, 2): single("w", LARGE, WHOLE) for r in range(2)}
    maps |= {rollout(r, 2): single("w", LARGE, WHOLE) for r in range(2)}
    hosts = {worker: f"host{worker.rank}" for worker in maps}
    assert links(build_plan(maps, hosts, Config())) == {(0, 0): 2**20, (1, 1): 2**20}
    crowded = dict.fromkeys(maps, "host0") | {trainer(1, 2): "elsewhere"}
    assert set(egress(build_plan(maps, crowded, Config())).values()) == {2**20}


def test_engines_of_different_parallelism_are_fed_at_once() -> None:
    shape = (512, 512)
    maps = {trainer(r, 4): single("w", shape, rows(shape, r, 4)) for r in range(4)}
    maps |= {rollout(r, 2, "pair"): single("w", shape, rows(shape, r, 2, 1)) for r in range(2)}
    maps |= {rollout(r, 4, "four"): single("w", shape, rows(shape, r, 4, 1)) for r in range(4)}
    assert set(egress(plan_of(maps)).values()) == {2 * 512 * 512 * 2 // 4}
