"""Failures that others reported, as plans."""

from __future__ import annotations

import math

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
from wbridge.errors import LayoutError, PlanError
from wbridge.ids import WorkerId
from wbridge.layout.source_map import ASSEMBLED, SourceMap
from wbridge.plan.expand import Expansion
from wbridge.plan.explain import explain
from wbridge.plan.types import Plan


def tensors_in(plan: Plan, index: int) -> set[str]:
    return {t.tensor for piece in groups_of(plan)[index].pieces for t in piece.transfers}


def test_c05_global_shape_multiplied_by_tp_is_named_with_both_workers() -> None:
    maps = {
        trainer(0, 1): single("embed", (32, 4), ((0, 32), (0, 4))),
        rollout(0, 2): single("embed", (16, 4), ((0, 8), (0, 4))),
        rollout(1, 2): single("embed", (16, 4), ((8, 16), (0, 4))),
    }
    with pytest.raises(
        LayoutError, match=r"'embed' has global shape \(32, 4\) on trainer/train\[0\]"
    ) as caught:
        plan_of(maps)
    assert "(16, 4) on rollout/engine0[0]" in str(caught.value)


def test_c05_a_trainer_that_doubles_its_padded_vocab_disagrees_with_the_other_trainer() -> None:
    maps = {
        trainer(0, 2): single("embed", (16, 4), ((0, 8), (0, 4))),
        trainer(1, 2): single("embed", (32, 4), ((8, 16), (0, 4))),
        rollout(0, 1): single("embed", (16, 4), ((0, 16), (0, 4))),
    }
    with pytest.raises(
        LayoutError, match=r"\(16, 4\) on trainer/train\[0\] but \(32, 4\) on trainer/train\[1\]"
    ):
        plan_of(maps)


def experts_at_once() -> dict[WorkerId, SourceMap]:
    """Two expert-parallel trainers; a loader that needs all four experts in one call."""
    names = [f"experts.{e}" for e in range(4)]
    maps = {trainer(r, 2): MapBuilder() for r in range(2)} | {rollout(0, 1): MapBuilder()}
    for worker, builder in maps.items():
        builder.whole("a.first", (8,)).whole("z.last", (8,))
        for e, name in enumerate(names):
            if worker.role == "rollout":
                builder.whole(name, (8,), parameter=ASSEMBLED + name)
            elif e // 2 == worker.rank:
                builder.whole(name, (8,))
    return {
        worker: builder.build(atomic=(tuple(names),)) if worker.role == "rollout" else builder.build()
        for worker, builder in maps.items()
    }


def test_c09_experts_that_a_loader_needs_at_once_share_a_group() -> None:
    maps = experts_at_once()
    plan = plan_of(maps, slot_nbytes=64)
    experts = {f"experts.{e}" for e in range(4)}
    assert len(groups_of(plan)) > 1
    assert [experts & tensors_in(plan, k) for k in range(len(groups_of(plan)))].count(experts) == 1
    assert sum(bool(experts & tensors_in(plan, k)) for k in range(len(groups_of(plan)))) == 1
    assert execute(plan, maps) == expected(maps)


def test_c10_a_slot_limit_between_a_pair_does_not_part_it() -> None:
    shapes = {"a": (20,), "pair.0": (10,), "pair.1": (10,), "z.large": (200,)}
    sender, receiver = MapBuilder(), MapBuilder()
    for name, shape in shapes.items():
        sender.whole(name, shape)
        receiver.whole(name, shape)
    maps = {trainer(0, 1): sender.build(), rollout(0, 1): receiver.build(atomic=(("pair.0", "pair.1"),))}
    plan = plan_of(maps, slot_nbytes=64)
    pair = {"pair.0", "pair.1"}
    holding = [pair & tensors_in(plan, k) for k in range(len(groups_of(plan)))]
    assert holding.count(pair) == 1
    assert holding.count(set()) == len(groups_of(plan)) - 1
    assert sum("z.large" in tensors_in(plan, k) for k in range(len(groups_of(plan)))) >= 400 // 64
    assert execute(plan, maps) == expected(maps)


def test_c11_fused_experts_stream_through_slots_of_one_expert() -> None:
    shape, expert_nbytes = (8, 16, 16), 16 * 16 * 2
    maps = {
        trainer(r, 2): single("experts", shape, rows(shape, r, 2)) for r in range(2)
    } | {rollout(0, 1): single("experts", shape, rows(shape, 0, 1))}  # fmt: skip
    plan = plan_of(maps, slot_nbytes=expert_nbytes)
    assert max(group.nbytes for group in groups_of(plan)) <= expert_nbytes
    assert len(groups_of(plan)) == 8
    assert execute(plan, maps) == expected(maps)


def test_c13_renamed_tensors_fail_with_counts_of_both_sides() -> None:
    sender, receiver = MapBuilder(), MapBuilder()
    for k in range(112):
        sender.whole(f"module.layer{k}", (2,))
        receiver.whole(f"layer{k}", (2,))
    sender.whole("norm", (2,))
    receiver.whole("norm", (2,))
    with pytest.raises(PlanError) as caught:
        plan_of({trainer(0, 1): sender.build(), rollout(0, 1): receiver.build()})
    message = str(caught.value)
    assert "no trainer has 112 of the 113 tensors that rollouts need" in message
    assert "of 113 tensors that trainers hold, 112 are needed by no rollout" in message
    assert "'layer0'" in message and "'module.layer0'" in message and "and 107 more" in message


def test_c14_experts_without_a_source_are_an_error_not_a_skip() -> None:
    names = [f"experts.{e}.{kind}" for e in range(4) for kind in ("gate", "up")]
    sender, receiver = MapBuilder().whole("norm", (4,)), MapBuilder().whole("norm", (4,))
    for name in names:
        receiver.whole(name, (3, 2), parameter="w13")
    with pytest.raises(PlanError, match=r"no trainer has 8 of the 9 tensors.*experts\.0\.gate"):
        plan_of({trainer(0, 1): sender.build(), rollout(0, 1): receiver.build()})
    for name in names:
        sender.whole(name, (3, 2))
    maps = {trainer(0, 1): sender.build(), rollout(0, 1): receiver.build()}
    assert execute(plan_of(maps), maps) == expected(maps)


def test_c19_float32_source_is_cast_to_bfloat16_before_it_travels() -> None:
    maps = {
        trainer(0, 1): single("lora", (4, 4), ((0, 4), (0, 4)), dtype="float32"),
        rollout(0, 1): single("lora", (4, 4), ((0, 4), (0, 4)), dtype="bfloat16"),
    }
    plan = plan_of(maps)
    (cast,) = explain(plan, Config()).casts
    assert (cast.source, cast.target, cast.wire, cast.nbytes) == ("float32", "bfloat16", "bfloat16", 32)
    assert sum(egress(plan).values()) == 32


def test_c21_five_rows_over_tp2_dp2_with_an_uneven_shard() -> None:
    shape = (5, 3)
    maps = {trainer(r, 4): single("w", shape, rows(shape, r % 2, 2)) for r in range(4)}
    maps |= {rollout(r, 3): single("w", shape, rows(shape, r, 3)) for r in range(3)}
    plan = plan_of(maps)
    assert execute(plan, maps) == expected(maps)
    assert sum(egress(plan).values()) == 30


def test_c22_three_rows_over_four_ranks_leave_one_shard_empty_on_both_sides() -> None:
    shape = (3, 2)
    maps = {trainer(r, 4): single("w", shape, rows(shape, r, 4)) for r in range(4)}
    maps |= {rollout(r, 4): single("w", shape, rows(shape, r, 4)) for r in range(4)}
    plan = plan_of(maps)
    assert execute(plan, maps) == expected(maps)
    assert egress(plan)[trainer(3, 4)] == 0
    assert Expansion(plan).groups_into(rollout(3, 4)) == ()


def test_c26_the_wire_dtype_belongs_to_the_pair_not_to_the_job() -> None:
    def build(router: str, dtype: str) -> SourceMap:
        return MapBuilder().whole("router", (4, 4), dtype=router).whole("w", (4, 4), dtype=dtype).build()

    maps = {
        trainer(0, 1): build("float32", "float32"),
        rollout(0, 1, "full"): build("float32", "bfloat16"),
        rollout(0, 1, "half"): build("bfloat16", "bfloat16"),
    }
    plan = plan_of(maps)
    wires = {
        (group.receiver.group, transfer.tensor): transfer.wire_dtype
        for group in groups_of(plan)
        for piece in group.pieces
        for transfer in piece.transfers
    }
    assert wires == {
        ("full", "router"): "float32",
        ("full", "w"): "bfloat16",
        ("half", "router"): "bfloat16",
        ("half", "w"): "bfloat16",
    }


def test_c29_include_patterns_leave_frozen_tensors_out() -> None:
    sender, receiver = MapBuilder(), MapBuilder()
    for k in range(9):
        sender.whole(f"tower.{k}.weight", (10,))
        receiver.whole(f"tower.{k}.weight", (10,), parameter="tower")
    sender.whole("head.weight", (10,))
    receiver.whole("head.weight", (10,))
    maps = {trainer(0, 1): sender.build(), rollout(0, 1): receiver.build()}
    plan = plan_of(maps, include=("head.*", "adapter.*"))
    assert sum(egress(plan).values()) == 20
    assert {parameter for parameter, _ in execute(plan, maps)[rollout(0, 1)]} == {"head.weight"}
    with pytest.raises(PlanError, match=r"include = \('tail\.\*',\) matches no checkpoint tensor"):
        plan_of(maps, include=("tail.*",))


def test_c29_include_may_not_divide_what_a_loader_needs_in_one_call() -> None:
    maps = experts_at_once()
    with pytest.raises(PlanError, match=r"include has 'experts\.0' and not 'experts\.1'"):
        plan_of(maps, include=("experts.0",))


@pytest.mark.parametrize(("sending", "receiving"), [(4, 2), (2, 1), (1, 3), (3, 2)])
def test_c65_any_pipeline_feeds_any_other(sending: int, receiving: int) -> None:
    def stages(worker: WorkerId, size: int) -> SourceMap:
        builder = MapBuilder()
        for layer in range(12):
            if layer * size // 12 == worker.rank:
                builder.whole(f"layers.{layer}", (3, 2))
        return builder.build()

    maps = {trainer(r, sending): stages(trainer(r, sending), sending) for r in range(sending)}
    maps |= {rollout(r, receiving): stages(rollout(r, receiving), receiving) for r in range(receiving)}
    plan = plan_of(maps, slot_nbytes=64)
    assert execute(plan, maps) == expected(maps)
    assert set(egress(plan).values()) == {12 // sending * 12}


def test_c65_stages_of_a_pipeline_send_side_by_side() -> None:
    """Every group but the last has a piece of each stage, so no trainer waits for another's turn."""
    maps = {trainer(r, 2): MapBuilder().build() for r in range(2)}
    receiver = MapBuilder()
    for rank in range(2):
        builder = MapBuilder()
        for layer in range(rank * 8, rank * 8 + 8):
            builder.whole(f"layers.{layer:02}", (4,))
            receiver.whole(f"layers.{layer:02}", (4,))
        maps[trainer(rank, 2)] = builder.build()
    maps[rollout(0, 1)] = receiver.build()
    plan = plan_of(maps, slot_nbytes=32)
    assert [len(group.pieces) for group in groups_of(plan)] == [2] * 4


@pytest.mark.parametrize(("sending", "receiving"), [(5, 2), (2, 5)])
def test_c71_any_number_of_senders_to_any_number_of_receivers(sending: int, receiving: int) -> None:
    shape = (10, 4)
    maps = {trainer(r, sending): single("w", shape, rows(shape, r, sending)) for r in range(sending)}
    maps |= {rollout(r, receiving): single("w", shape, rows(shape, r, receiving)) for r in range(receiving)}
    plan = plan_of(maps)
    assert execute(plan, maps) == expected(maps)
    assert set(egress(plan).values()) == {math.prod(shape) * 2 // sending}


def test_c71_idle_senders_are_ordinary() -> None:
    maps = {trainer(r, 5): MapBuilder().build() for r in range(4)}
    maps[trainer(4, 5)] = single("w", (4,), ((0, 4),))
    maps |= {rollout(r, 2): single("w", (4,), ((0, 4),)) for r in range(2)}
    plan = plan_of(maps)
    assert execute(plan, maps) == expected(maps)
    assert [nbytes for _, nbytes in sorted(egress(plan).items())] == [0, 0, 0, 0, 16]
