"""Random jobs: every plan delivers every element once, balanced, and the same whatever the input order."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.plan.world import (
    Box,
    MapBuilder,
    box_region,
    egress,
    elements,
    execute,
    expected,
    groups_of,
    rollout,
    row_major,
    rows,
    trainer,
)
from wbridge.config import Config
from wbridge.ids import WorkerId
from wbridge.layout.dtype import itemsize, wire_dtype
from wbridge.layout.region import Region, Strided
from wbridge.layout.source_map import SourceMap
from wbridge.plan.build import build_plan
from wbridge.plan.explain import explain

Job = tuple[dict[WorkerId, SourceMap], dict[WorkerId, str], Config]

HOLDINGS = ("chunk", "replica", "grid", "pairs", "uneven copies", "first only", "interleaved", "doubled")
NEEDS = ("chunk", "replica", "fused", "transposed", "every other", "repeated", "grid")


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    num_trainers, num_rollouts = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    shapes = draw(st.lists(st.lists(st.integers(1, 5), max_size=3), min_size=1, max_size=3))
    dtypes = draw(
        st.tuples(st.sampled_from(("bfloat16", "float32")), st.sampled_from(("bfloat16", "float32")))
    )
    builders = {trainer(r, num_trainers): MapBuilder() for r in range(num_trainers)}
    builders |= {rollout(r, num_rollouts): MapBuilder() for r in range(num_rollouts)}
    for number, shape in enumerate(shapes):
        held, needed = draw(st.sampled_from(HOLDINGS)), draw(st.sampled_from(NEEDS))
        dim = draw(st.integers(0, max(0, len(shape) - 1)))
        for worker, builder in builders.items():
            if worker.role == "trainer":
                _hold(builder, held, f"t{number}", shape, worker.rank, num_trainers, dim, dtypes[0])
            else:
                _need(builder, needed, f"t{number}", shape, worker.rank, num_rollouts, dim, dtypes[1])
    maps = {worker: builder.build() for worker, builder in builders.items()}
    of_rollouts = draw(st.sampled_from(("ab", "bc")))
    hosts = {w: draw(st.sampled_from("ab" if w.role == "trainer" else of_rollouts)) for w in maps}
    return maps, hosts, Config(slot_nbytes=draw(st.integers(8, 200)))


def _hold(
    builder: MapBuilder, kind: str, tensor: str, shape: list[int], rank: int, size: int, dim: int, dtype: str
) -> None:
    num_elements = math.prod(shape)
    if kind == "interleaved" and num_elements > rank:
        count = -(-(num_elements - rank) // size)
        builder.region(tensor, shape, Region((count,), Strided(rank, (size,)), Strided(2, (2,))), dtype=dtype)
    elif kind == "doubled":
        twice = Region((2, num_elements), Strided(0, (0, 1)), Strided(0, (num_elements, 1)))
        builder.region(tensor, shape, twice, dtype=dtype)
    elif kind != "interleaved":
        builder.box(tensor, shape, _held_box(kind, shape, rank, size, dim), dtype=dtype)


def _held_box(kind: str, shape: list[int], rank: int, size: int, dim: int) -> Box:
    whole = tuple((0, extent) for extent in shape)
    if not shape or kind == "replica":
        return whole
    if kind == "pairs" and size > 1:
        return rows(shape, rank % (size // 2), size // 2, dim)
    if kind == "grid" and size > 1:
        return _grid(shape, rank, size)
    if kind == "uneven copies":
        return whole if rank == 0 else rows(shape, rank % 2, 2, dim)
    if kind == "first only":
        return whole if rank == 0 else tuple((0, 0) for _ in shape)
    return rows(shape, rank, size, dim)


def _grid(shape: list[int], rank: int, size: int) -> Box:
    """Divide the first dim in two and the last in the rest; workers that are left over hold nothing."""
    across = size // 2
    if len(shape) < 2 or rank >= 2 * across or size < 2:
        return rows(shape, rank, size)
    return (rows(shape, rank // across, 2)[0], *rows(shape, rank % across, across, len(shape) - 1)[1:])


def _need(
    builder: MapBuilder, kind: str, tensor: str, shape: list[int], rank: int, size: int, dim: int, dtype: str
) -> None:
    whole = tuple((0, extent) for extent in shape)
    strides = row_major(shape)
    num_elements = math.prod(shape)
    if kind == "fused":
        builder.box(
            tensor, shape, rows(shape, rank, size, dim) if shape else whole, parameter="fused", dtype=dtype
        )
    elif kind == "grid" and shape and size > 1:
        builder.box(tensor, shape, _grid(shape, rank, size), dtype=dtype)
    elif kind == "transposed":
        dense = box_region(shape, whole)
        assert dense is not None
        flipped = Region(dense.extents[::-1], Strided(0, strides[::-1]), Strided(3, row_major(shape[::-1])))
        builder.region(tensor, shape, flipped, dtype=dtype)
    elif kind == "every other" and num_elements > rank:
        count = -(-(num_elements - rank) // 2)
        builder.region(tensor, shape, Region((count,), Strided(rank, (2,)), Strided(1, (3,))), dtype=dtype)
    elif kind == "repeated":
        region = Region((num_elements, 3), Strided(0, (1, 0)), Strided(0, (3, 1)))
        builder.region(tensor, shape, region, dtype=dtype)
    elif kind == "chunk" and shape:
        builder.box(tensor, shape, rows(shape, rank, size, dim), dtype=dtype)
    else:
        builder.box(tensor, shape, whole, dtype=dtype)


@given(jobs())
def test_every_needed_element_arrives_exactly_once(job: Job) -> None:
    maps, hosts, config = job
    plan = build_plan(maps, hosts, config)
    assert execute(plan, maps) == expected(maps)


@given(jobs())
def test_nothing_travels_that_is_not_needed_and_explain_agrees(job: Job) -> None:
    maps, hosts, config = job
    plan = build_plan(maps, hosts, config)
    sent = sum(piece.nbytes for group in groups_of(plan) for piece in group.pieces)
    explanation = explain(plan, config)
    assert sent == explanation.needed_nbytes == explanation.sent_nbytes + explanation.relayed_nbytes
    assert sum(explanation.egress_nbytes.values()) == explanation.sent_nbytes
    assert explanation.sent_nbytes <= sum(explanation.ingress_nbytes.values()) <= sent
    assert sum(link.nbytes for link in explanation.links) == sent
    assert explanation.ratio >= 1.0


@given(jobs())
def test_groups_respect_the_slot_and_align_every_transfer(job: Job) -> None:
    maps, hosts, config = job
    for group in groups_of(build_plan(maps, hosts, config)):
        padding = group.nbytes - sum(piece.nbytes for piece in group.pieces)
        assert group.nbytes <= config.slot_nbytes
        assert 0 <= padding < 8 * len(group.pieces)
        for piece in group.pieces:
            assert piece.offset % 8 == 0
            assert all(t.slot_offset % itemsize(t.wire_dtype) == 0 for t in piece.transfers)


@given(jobs(), st.randoms(use_true_random=False))
def test_the_plan_does_not_depend_on_the_order_of_its_input(job: Job, shuffler: random.Random) -> None:
    maps, hosts, config = job
    plan = build_plan(maps, hosts, config)
    workers = list(maps)
    shuffler.shuffle(workers)
    shuffled: dict[WorkerId, SourceMap] = {}
    for worker in workers:
        mapped = list(maps[worker].mapped)
        shuffler.shuffle(mapped)
        names = list(maps[worker].parameters)
        shuffler.shuffle(names)
        shuffled[worker] = SourceMap(
            checkpoint=dict(reversed(maps[worker].checkpoint.items())),
            parameters={name: maps[worker].parameters[name] for name in names},
            mapped=tuple(mapped),
        )
    assert build_plan(shuffled, hosts, config) == plan


@given(jobs())
def test_the_most_loaded_trainer_sends_about_the_least_possible(job: Job) -> None:
    maps, hosts, config = job
    plan = build_plan(maps, hosts, msgspec.structs.replace(config, relays="off"))
    loads = egress(plan)
    # A cell is divided in whole blocks, and the parts of each kind of receiver are rounded by themselves.
    slack = 0
    for planned in plan.classes:
        for cell in planned.cells:
            if len(cell.owners) > 1:
                slack += (
                    2 * cell.nbytes * sum(1 for table, _ in cell.needed for k in plan.table_of if k == table)
                )
    assert max(loads.values(), default=0) <= _least_maximum(maps) + slack + 1


def _least_maximum(maps: Mapping[WorkerId, SourceMap]) -> float:
    """Return the least possible maximum of divisible loads: the tightest set of trainers decides."""
    owners: dict[tuple[str, int], set[WorkerId]] = {}
    for worker, source_map in maps.items():
        if worker.role == "trainer":
            for mapped in source_map.mapped:
                for source, _ in elements(mapped.region):
                    owners.setdefault((mapped.tensor, source), set()).add(worker)
    needed: dict[frozenset[WorkerId], int] = {}
    for worker, source_map in maps.items():
        if worker.role == "rollout":
            for mapped in source_map.mapped:
                source_dtype = next(iter(_trainer_dtypes(maps, mapped.tensor)))
                width = itemsize(wire_dtype(source_dtype, source_map.parameters[mapped.parameter].dtype))
                for source in {source for source, _ in elements(mapped.region)}:
                    holders = frozenset(owners[mapped.tensor, source])
                    needed[holders] = needed.get(holders, 0) + width
    trainers = [worker for worker in maps if worker.role == "trainer"]
    subsets = itertools.chain.from_iterable(
        itertools.combinations(trainers, size) for size in range(1, len(trainers) + 1)
    )
    return max(
        sum(nbytes for holders, nbytes in needed.items() if holders <= set(subset)) / len(subset)
        for subset in subsets
    )


def _trainer_dtypes(maps: Mapping[WorkerId, SourceMap], tensor: str) -> set[str]:
    return {
        source_map.parameters[tensor].dtype
        for worker, source_map in maps.items()
        if worker.role == "trainer" and tensor in source_map.parameters
    }


@settings(max_examples=20)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 9))
def test_idle_and_empty_workers_are_ordinary(num_trainers: int, num_rollouts: int, num_rows: int) -> None:
    shape = (num_rows, 3)
    maps = {
        worker(rank, size): MapBuilder().box("w", shape, rows(shape, rank, size)).whole("scale", ()).build()
        for worker, size in ((trainer, num_trainers), (rollout, num_rollouts))
        for rank in range(size)
    }
    plan = build_plan(maps, dict.fromkeys(maps, "a"), Config())
    assert execute(plan, maps) == expected(maps)
