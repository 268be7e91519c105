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
from wbridge.errors import CoverageError
from wbridge.ids import WorkerId
from wbridge.layout.source_map import SourceMap
from wbridge.plan import geometry as geometry_module

SHAPE = (4, 2)
WHOLE = ((0, 4), (0, 2))


def cells_of(maps: dict[WorkerId, SourceMap]) -> list[tuple[int, list[int]]]:
    """Return (elements, owner ranks) of every cell."""
    plan = plan_of(maps)
    cells = [cell for planned in plan.classes for cell in planned.cells]
    return sorted((c.region.num_elements, [plan.workers[k].rank for k in c.owners]) for c in cells)


def test_replicas_give_one_cell_with_several_owners() -> None:
    maps = {trainer(r, 3): single("w", SHAPE, WHOLE) for r in range(3)} | {
        rollout(0, 1): single("w", SHAPE, WHOLE)
    }
    assert cells_of(maps) == [(8, [0, 1, 2])]


def test_a_full_copy_and_a_half_overlap_only_in_the_half() -> None:
    maps = {
        trainer(0, 2): single("w", SHAPE, WHOLE),
        trainer(1, 2): single("w", SHAPE, ((0, 2), (0, 2))),
        rollout(0, 1): single("w", SHAPE, WHOLE),
    }
    assert cells_of(maps) == [(4, [0]), (4, [0, 1])]
    assert execute(plan_of(maps), maps) == expected(maps)


def test_shards_along_different_dims_meet_in_cells() -> None:
    maps = {
        trainer(0, 4): single("w", SHAPE, rows(SHAPE, 0, 2)),
        trainer(1, 4): single("w", SHAPE, rows(SHAPE, 1, 2)),
        trainer(2, 4): single("w", SHAPE, rows(SHAPE, 0, 2, 1)),
        trainer(3, 4): single("w", SHAPE, rows(SHAPE, 1, 2, 1)),
        rollout(0, 1): single("w", SHAPE, WHOLE),
    }
    assert cells_of(maps) == [(2, [0, 2]), (2, [0, 3]), (2, [1, 2]), (2, [1, 3])]


def test_two_names_of_one_tensor_inside_a_trainer_count_as_one_owner() -> None:
    maps = {
        trainer(0, 1): MapBuilder()
        .whole("w", SHAPE, parameter="head")
        .whole("w", SHAPE, parameter="embed")
        .build(),
        rollout(0, 1): MapBuilder().whole("w", SHAPE, parameter="a").whole("w", SHAPE, parameter="b").build(),
    }
    assert cells_of(maps) == [(8, [0])]
    assert sum(egress(plan_of(maps)).values()) == 16  # it travels once, to both
    plan = plan_of(maps)
    assert execute(plan, maps) == expected(maps)
    assert {t.source_parameter for g in groups_of(plan) for p in g.pieces for t in p.transfers} == {"embed"}


def test_replicated_parameters_go_to_each_worker_that_stores_them() -> None:
    """Two KV heads over four rollout workers: each head is stored twice."""
    maps = {trainer(0, 1): single("k", SHAPE, WHOLE)}
    maps |= {rollout(r, 4): single("k", SHAPE, rows(SHAPE, r // 2, 2)) for r in range(4)}
    plan = plan_of(maps)
    assert execute(plan, maps) == expected(maps)
    assert len({group.receiver for group in groups_of(plan)}) == 4


def test_a_partly_held_tensor_names_what_is_missing() -> None:
    maps = {
        trainer(0, 2): single("w", SHAPE, ((0, 2), (0, 2))),
        trainer(1, 2): single("w", SHAPE, ((2, 3), (0, 2))),
        rollout(0, 1): single("w", SHAPE, WHOLE),
    }
    with pytest.raises(CoverageError) as caught:
        plan_of(maps)
    message = str(caught.value)
    assert "rollout/engine0[0]: parameter 'w' needs 8 elements of 'w' [4, 2]" in message
    assert "no trainer holds 2 of them, such as the one at [3, 0]" in message
    assert "2 trainers hold parts, the first trainer/train[0]" in message


def test_equal_experts_cost_no_further_geometry(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    intersect = geometry_module.intersect
    monkeypatch.setattr(geometry_module, "intersect", lambda a, b: (asked.append(a), intersect(a, b))[1])

    def questions(num_experts: int) -> int:
        maps = {trainer(r, 2): MapBuilder() for r in range(2)} | {
            rollout(r, 4): MapBuilder() for r in range(4)
        }
        for e in range(num_experts):
            for worker, builder in maps.items():
                shard = rows(SHAPE, worker.rank % 2, 2, worker.role == "rollout")
                builder.box(f"experts.{e}", SHAPE, shard, parameter="w13")
        asked.clear()
        plan_of({worker: builder.build() for worker, builder in maps.items()})
        return len(asked)

    assert 0 < questions(2) == questions(40)
