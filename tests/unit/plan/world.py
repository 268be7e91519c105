"""Small jobs for plan tests: source maps of boxes, and an executor that moves labels instead of bytes."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from wbridge.config import Config
from wbridge.ids import WorkerId
from wbridge.layout.dtype import itemsize
from wbridge.layout.region import Region, Strided
from wbridge.layout.source_map import Mapped, ParameterSpec, SourceMap, TensorSpec
from wbridge.plan.build import build_plan
from wbridge.plan.expand import Expansion
from wbridge.plan.types import Group, Plan, Transfer

Box = tuple[tuple[int, int], ...]
"""A half-open range for each dim of a checkpoint tensor."""

Label = tuple[str, int]
"""A checkpoint element: tensor and row-major index."""


def trainer(rank: int, size: int = 8) -> WorkerId:
    return WorkerId(role="trainer", group="train", mesh_shape=(size,), coordinate=(rank,))


def rollout(rank: int, size: int = 8, engine: str = "engine0") -> WorkerId:
    return WorkerId(role="rollout", group=engine, mesh_shape=(size,), coordinate=(rank,))


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[k + 1 :]) for k in range(len(shape)))


def box_region(shape: Sequence[int], box: Box, *, offset: int = 0) -> Region | None:
    """Return the region of a box held densely from `offset`, or None when it is empty."""
    extents = tuple(stop - start for start, stop in box)
    if 0 in extents:
        return None
    strides = row_major(shape)
    start = sum(low * stride for (low, _), stride in zip(box, strides, strict=True))
    return Region(extents, source=Strided(start, strides), target=Strided(offset, row_major(extents)))


def rows(shape: Sequence[int], index: int, parts: int, dim: int = 0) -> Box:
    """Return part `index` of one dim divided as torch's chunk divides: late parts may be short or empty."""
    step = -(-shape[dim] // parts)
    box = [(0, extent) for extent in shape]
    box[dim] = (min(index * step, shape[dim]), min((index + 1) * step, shape[dim]))
    return tuple(box)


class MapBuilder:
    """Collects the parameters and regions of one worker."""

    def __init__(self) -> None:
        self.checkpoint: dict[str, TensorSpec] = {}
        self.parameters: dict[str, ParameterSpec] = {}
        self.mapped: list[Mapped] = []

    def box(
        self, tensor: str, shape: Sequence[int], box: Box, *, dtype: str = "bfloat16", parameter: str = ""
    ) -> MapBuilder:
        """Add a box of `tensor`; to an existing `parameter` it is appended, as fused parameters do."""
        name = parameter or tensor
        self.checkpoint[tensor] = TensorSpec(shape=tuple(shape), dtype=dtype)
        held = math.prod(self.parameters[name].shape) if name in self.parameters else 0
        region = box_region(shape, box, offset=held)
        size = held + (region.num_elements if region else 0)
        self.parameters[name] = ParameterSpec(shape=(size,), strides=(1,), dtype=dtype)
        if region is not None:
            self.mapped.append(Mapped(parameter=name, tensor=tensor, region=region))
        return self

    def whole(self, tensor: str, shape: Sequence[int], **options: str) -> MapBuilder:
        return self.box(tensor, shape, tuple((0, extent) for extent in shape), **options)

    def region(
        self,
        tensor: str,
        shape: Sequence[int],
        region: Region,
        *,
        dtype: str = "bfloat16",
        parameter: str = "",
    ) -> MapBuilder:
        """Add any region of `tensor` to a parameter of its own."""
        name = parameter or tensor
        self.checkpoint[tensor] = TensorSpec(shape=tuple(shape), dtype=dtype)
        size = 1 + max(target for _, target in elements(region))
        self.parameters[name] = ParameterSpec(shape=(size,), strides=(1,), dtype=dtype)
        self.mapped.append(Mapped(parameter=name, tensor=tensor, region=region))
        return self

    def build(self, **options: object) -> SourceMap:
        return SourceMap(
            checkpoint=dict(self.checkpoint),
            parameters=dict(self.parameters),
            mapped=tuple(self.mapped),
            **options,  # type: ignore[arg-type]  # the optional fields of SourceMap
        )


def single(tensor: str, shape: Sequence[int], box: Box, *, dtype: str = "bfloat16") -> SourceMap:
    return MapBuilder().box(tensor, shape, box, dtype=dtype).build()


def one_host(maps: Mapping[WorkerId, SourceMap]) -> dict[WorkerId, str]:
    return dict.fromkeys(maps, "host0")


def plan_of(maps: Mapping[WorkerId, SourceMap], **settings: object) -> Plan:
    return build_plan(maps, one_host(maps), Config(**settings))  # type: ignore[arg-type]  # settings by name


def groups_of(plan: Plan) -> tuple[Group, ...]:
    return Expansion(plan).all_groups()


def egress(plan: Plan) -> dict[WorkerId, int]:
    """Return the bytes that each trainer sends."""
    sent = {worker: 0 for worker in plan.workers if worker.role == "trainer"}
    for group in groups_of(plan):
        for piece in group.pieces:
            sent[piece.writer] += piece.nbytes
    return sent


def elements(region: Region) -> Iterator[tuple[int, int]]:
    """Yield (checkpoint index, parameter index) of every element."""
    for index in itertools.product(*map(range, region.extents)):
        yield at(region.source, index), at(region.target, index)


def at(view: Strided, index: Sequence[int]) -> int:
    return view.offset + sum(i * stride for i, stride in zip(index, view.strides, strict=True))


def held_labels(source_map: SourceMap) -> dict[tuple[str, int], Label]:
    """Return which checkpoint element each (parameter, index) holds."""
    return {
        (mapped.parameter, target): (mapped.tensor, source)
        for mapped in source_map.mapped
        for source, target in elements(mapped.region)
    }


def execute(plan: Plan, maps: Mapping[WorkerId, SourceMap]) -> dict[WorkerId, dict[tuple[str, int], Label]]:
    """Run the plan on labels: gather each piece into a slot, scatter each slot; no byte or target twice."""
    memory = {worker: held_labels(maps[worker]) for worker in maps}
    received: dict[WorkerId, dict[tuple[str, int], Label]] = {
        worker: {} for worker in maps if worker.role == "rollout"
    }
    for group in groups_of(plan):
        slot: dict[int, Label] = {}
        for piece in group.pieces:
            filled: Counter[int] = Counter()
            for transfer in piece.transfers:
                _gather(transfer, memory[piece.writer], slot, filled)
            assert sorted(filled) == list(range(piece.offset, piece.offset + piece.nbytes))
            targets = len({transfer.target_parameter for transfer in piece.transfers})
            assert max(filled.values()) <= targets, "two elements in one byte"
        for piece in group.pieces:
            for transfer in piece.transfers:
                _scatter(transfer, slot, received[group.receiver])
    return received


def expected(maps: Mapping[WorkerId, SourceMap]) -> dict[WorkerId, dict[tuple[str, int], Label]]:
    return {
        worker: held_labels(source_map) for worker, source_map in maps.items() if worker.role == "rollout"
    }


def _byte(transfer: Transfer, index: Sequence[int]) -> int:
    return transfer.slot_offset + at(transfer.wire, index) * itemsize(transfer.wire_dtype)


def _gather(
    transfer: Transfer, memory: Mapping[tuple[str, int], Label], slot: dict[int, Label], filled: Counter[int]
) -> None:
    loops = zip(transfer.extents, transfer.wire.strides, strict=True)
    for index in itertools.product(*(range(n) if stride else range(1) for n, stride in loops)):
        first = _byte(transfer, index)
        label = memory[transfer.source_parameter, at(transfer.source, index)]
        assert slot.setdefault(first, label) == label, "two elements in one byte"
        filled.update(range(first, first + itemsize(transfer.wire_dtype)))


def _scatter(transfer: Transfer, slot: Mapping[int, Label], received: dict[tuple[str, int], Label]) -> None:
    for index in itertools.product(*map(range, transfer.extents)):
        target = (transfer.target_parameter, at(transfer.target, index))
        assert target not in received, f"{target} is written twice"
        received[target] = slot[_byte(transfer, index)]
