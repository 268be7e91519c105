from __future__ import annotations

import pytest

from tests.unit.plan.world import MapBuilder, groups_of, plan_of, rollout, rows, single, trainer
from wbridge.config import Config
from wbridge.errors import LayoutError, PlanError
from wbridge.ids import WorkerId
from wbridge.layout.source_map import SourceMap
from wbridge.plan.build import build_plan

BOX = ((0, 4), (0, 2))


def pair(source: str, target: str) -> dict[WorkerId, SourceMap]:
    return {
        trainer(0, 1): single("w", (4, 2), BOX, dtype=source),
        rollout(0, 1): single("w", (4, 2), BOX, dtype=target),
    }


def test_equal_shards_of_several_trainers_share_one_table() -> None:
    shape = (4, 2)
    maps = {trainer(r, 4): single("w", shape, rows(shape, r % 2, 2)) for r in range(4)}
    maps[rollout(0, 1)] = single("w", shape, BOX)
    plan = plan_of(maps)
    assert len(plan.tables) == 3
    assert [[plan.workers[k].rank for k in cell.owners] for cell in plan.classes[0].cells] == [[0, 2], [1, 3]]


def test_tensors_that_only_trainers_hold_are_counted_as_unused() -> None:
    maps = pair("bfloat16", "bfloat16")
    maps[trainer(0, 1)] = MapBuilder().whole("w", (4, 2)).whole("extra", (3,)).build()
    assert plan_of(maps).num_unused_tensors == 1


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("int32", "float32"),
        ("float32", "int32"),
        ("int64", "int32"),
        ("bool", "uint8"),
        ("complex64", "float64"),
    ],
)
def test_only_float_types_are_cast(source: str, target: str) -> None:
    with pytest.raises(
        LayoutError, match=f"'w' is {source} in 'w' of trainer.*but {target} in 'w' of rollout"
    ):
        plan_of(pair(source, target))


@pytest.mark.parametrize("dtype", ["bool", "int64", "complex64", "float8_e4m3fn", "float64"])
def test_any_dtype_travels_to_itself(dtype: str) -> None:
    (group,) = groups_of(plan_of(pair(dtype, dtype)))
    assert group.pieces[0].transfers[0].wire_dtype == dtype


def test_trainers_that_hold_one_tensor_in_two_dtypes_are_ambiguous() -> None:
    maps = pair("bfloat16", "bfloat16")
    maps[trainer(1, 2)] = single("w", (4, 2), BOX, dtype="float32")
    with pytest.raises(LayoutError, match=r"is bfloat16 on trainer.* but float32 on trainer"):
        plan_of(maps)


@pytest.mark.parametrize("role", ["trainer", "rollout"])
def test_a_plan_needs_both_roles(role: str) -> None:
    maps = {worker: m for worker, m in pair("bfloat16", "bfloat16").items() if worker.role != role}
    with pytest.raises(PlanError, match=f"no {role} has reported"):
        plan_of(maps)


def test_every_worker_needs_a_host() -> None:
    with pytest.raises(PlanError, match="have no host"):
        build_plan(pair("bfloat16", "bfloat16"), {}, Config())
