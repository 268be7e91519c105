from __future__ import annotations

import pytest

from tests.unit.plan.world import (
    MapBuilder,
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
from wbridge.errors import PlanError
from wbridge.layout.region import Region, Strided
from wbridge.plan.expand import Expansion
from wbridge.plan.schedule import ring_slots


def test_groups_are_numbered_for_each_receiver() -> None:
    shape = (64,)
    maps = {trainer(0, 1): single("w", shape, ((0, 64),))}
    maps |= {rollout(r, 2): single("w", shape, rows(shape, r, 2)) for r in range(2)}
    plan = plan_of(maps, slot_nbytes=16)
    for rank in range(2):
        assert [group.index for group in Expansion(plan).groups_into(rollout(rank, 2))] == [0, 1, 2, 3]
    assert {group.stage for group in groups_of(plan)} == {1}


def test_each_writer_has_one_contiguous_piece_of_a_group() -> None:
    shape = (30,)
    maps = {trainer(r, 3): single("w", shape, rows(shape, r, 3)) for r in range(3)}
    maps[rollout(0, 1)] = single("w", shape, ((0, 30),))
    (group,) = groups_of(plan_of(maps))
    assert [(piece.writer.rank, piece.offset, piece.nbytes) for piece in group.pieces] == [
        (0, 0, 20),
        (1, 24, 20),
        (2, 48, 20),
    ]
    assert group.nbytes == 68


def test_wide_elements_come_first_so_that_nothing_is_padded() -> None:
    sender = MapBuilder()
    for name, dtype in (("a", "uint8"), ("b", "float64"), ("c", "bfloat16"), ("d", "float32")):
        sender.whole(name, (3,), dtype=dtype)
    maps = {trainer(0, 1): sender.build(), rollout(0, 1): sender.build()}
    (piece,) = groups_of(plan_of(maps))[0].pieces
    assert [(t.tensor, t.slot_offset) for t in piece.transfers] == [("b", 0), ("d", 24), ("c", 36), ("a", 42)]
    assert piece.nbytes == 45


def test_replicated_targets_travel_once() -> None:
    repeated = Region((4, 3), source=Strided(0, (1, 0)), target=Strided(0, (3, 1)))
    maps = {
        trainer(0, 1): single("scale", (4,), ((0, 4),)),
        rollout(0, 1): MapBuilder().region("scale", (4,), repeated).build(),
    }
    plan = plan_of(maps)
    (transfer,) = groups_of(plan)[0].pieces[0].transfers
    assert groups_of(plan)[0].nbytes == 8
    assert transfer.extents == (4, 3)
    assert transfer.wire.strides == (1, 0)
    assert execute(plan, maps) == expected(maps)


def test_a_slot_smaller_than_an_element_is_refused() -> None:
    maps = {trainer(0, 1): single("w", (4,), ((0, 4),)), rollout(0, 1): single("w", (4,), ((0, 4),))}
    with pytest.raises(PlanError, match="slot_nbytes = 7: raise it to at least 8 bytes"):
        plan_of(maps, slot_nbytes=7)


def test_slots_are_filled_well() -> None:
    shape = (1000,)
    maps = {trainer(0, 1): single("w", shape, ((0, 1000),)), rollout(0, 1): single("w", shape, ((0, 1000),))}
    plan = plan_of(maps, slot_nbytes=128)
    assert len(groups_of(plan)) <= 2000 / 128 * 4 / 3 + 1


def test_atomic_sets_that_share_a_tensor_become_one() -> None:
    names = ("a", "b", "c", "d")
    sender = MapBuilder()
    for name in names:
        sender.whole(name, (4,))
    maps = {trainer(0, 1): sender.build(), rollout(0, 1): sender.build(atomic=(("b", "c"), ("c", "d")))}
    plan = plan_of(maps, slot_nbytes=24)
    assert [{t.tensor for p in group.pieces for t in p.transfers} for group in groups_of(plan)] == [
        {"a"},
        {"b", "c", "d"},
    ]


@pytest.mark.parametrize(
    ("num_slots", "num_groups", "staging", "slots"),
    [
        (0, 10, "pinned", 10),
        (0, 10, "direct", 4),
        (0, 2, "direct", 2),
        (3, 10, "pinned", 3),
        (3, 10, "direct", 3),
        (12, 10, "pinned", 10),
        (12, 2, "direct", 2),
        (3, 0, "pinned", 0),
    ],
)
def test_ring_slots(num_slots: int, num_groups: int, staging: str, slots: int) -> None:
    config = Config(num_slots=num_slots)
    assert ring_slots(config, num_groups, staging) == slots  # type: ignore[arg-type]  # literals above


def test_a_ring_whose_slots_are_kept_for_others_has_more_of_them() -> None:
    """A group and the credits for it pass several full links; the trainers' own is to wait for none."""
    assert ring_slots(Config(), 128, "direct", passes_on=True) == 6 * ring_slots(Config(), 128, "direct")
    assert ring_slots(Config(num_slots=3), 128, "direct", passes_on=True) == 3
    assert ring_slots(Config(), 5, "direct", passes_on=True) == 5
