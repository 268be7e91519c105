"""Which indices of a dimension a shard holds, as O(1) progressions, and the regions they span."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from wbridge.errors import LayoutError
from wbridge.layout.region import Region, Strided
from wbridge.layout.source_map import Mapped


class Run(msgspec.Struct, frozen=True):
    """`count` consecutive global indices from `start`, held at local indices from `position`."""

    start: int
    count: int
    position: int


class Progression(msgspec.Struct, frozen=True):
    """`repeat` runs of `count` indices; starts and positions advance by a constant step."""

    start: int
    position: int
    repeat: int
    start_step: int
    position_step: int
    count: int


class Part(msgspec.Struct, frozen=True):
    """A box of an unsharded parameter that is (a strided part of) one checkpoint tensor.

    Along dimension d the box holds indices `lows[d] <= i < lows[d] + extents[d]`; each step moves
    `source_strides[d]` elements in the checkpoint tensor, from element `source_offset`.
    """

    tensor: str
    lows: tuple[int, ...]
    extents: tuple[int, ...]
    source_offset: int
    source_strides: tuple[int, ...]


def whole_run(length: int) -> tuple[Run, ...]:
    """Return the runs of an unsharded dimension."""
    return (Run(0, length, 0),) if length else ()


def shard_runs(runs: Sequence[Run], *, num_shards: int, index: int, split_factor: int = 1) -> tuple[Run, ...]:
    """Return the runs left after one sharding step, with chunks of rounded-up size as in `torch.chunk`.

    With a `split_factor` the dimension is first cut into that many chunks, and shard `index` of each
    is kept: what a strided shard means.
    """
    length = sum(run.count for run in runs)
    kept: list[Run] = []
    for piece in range(split_factor):
        low, high = _chunk(length, split_factor, piece)
        first, last = _chunk(high - low, num_shards, index)
        for run in _take(runs, low + first, low + last):
            if kept and kept[-1].start + kept[-1].count == run.start:
                kept[-1] = Run(kept[-1].start, kept[-1].count + run.count, kept[-1].position)
            else:
                kept.append(Run(run.start, run.count, sum(k.count for k in kept)))
    return tuple(kept)


def _chunk(length: int, num_chunks: int, index: int) -> tuple[int, int]:
    size = -(-length // num_chunks)
    return min(index * size, length), min((index + 1) * size, length)


def _take(runs: Sequence[Run], low: int, high: int) -> list[Run]:
    """Return the global runs at local positions low..high-1."""
    taken = []
    for run in runs:
        first, last = max(low, run.position), min(high, run.position + run.count)
        if first < last:
            taken.append(Run(run.start + first - run.position, last - first, first))
    return taken


def _clip(runs: Sequence[Run], low: int, high: int) -> list[Run]:
    """Return the part of `runs` whose global indices are low..high-1."""
    clipped = []
    for run in runs:
        first, last = max(low, run.start), min(high, run.start + run.count)
        if first < last:
            clipped.append(Run(first, last - first, run.position + first - run.start))
    return clipped


def progressions(runs: Sequence[Run]) -> list[Progression]:
    """Join runs of equal length and spacing: an even strided shard is one progression."""
    joined: list[Progression] = []
    for run in runs:
        last = joined[-1] if joined else None
        if last is not None and last.count == run.count:
            start_step = run.start - (last.start + (last.repeat - 1) * last.start_step)
            position_step = run.position - (last.position + (last.repeat - 1) * last.position_step)
            if last.repeat == 1 or (start_step, position_step) == (last.start_step, last.position_step):
                joined[-1] = Progression(
                    last.start, last.position, last.repeat + 1, start_step, position_step, last.count
                )
                continue
        joined.append(Progression(run.start, run.position, 1, 0, 0, run.count))
    return joined


def part_of(mapped: Mapped, shape: tuple[int, ...], strides: tuple[int, ...]) -> Part:
    """Read a region of an unsharded parameter of this shape and these strides as a box.

    Raises:
        LayoutError: the region is not a box of the parameter.
    """
    lows = []
    rest = mapped.region.target.offset
    for n, stride in zip(shape, strides, strict=True):
        low = rest // stride if n > 1 else 0
        lows.append(low)
        rest -= low * stride
    extents, source_strides = [1] * len(shape), [0] * len(shape)
    for n, source, target in zip(
        mapped.region.extents, mapped.region.source.strides, mapped.region.target.strides, strict=True
    ):
        if n == 1:
            continue
        dims = [d for d in range(len(shape)) if shape[d] > 1 and strides[d] == target and extents[d] == 1]
        if not dims:
            raise LayoutError(_not_a_box(mapped, shape))
        extents[dims[0]], source_strides[dims[0]] = n, source
    if rest or any(low + n > size for low, n, size in zip(lows, extents, shape, strict=True)):
        raise LayoutError(_not_a_box(mapped, shape))
    return Part(
        mapped.tensor, tuple(lows), tuple(extents), mapped.region.source.offset, tuple(source_strides)
    )


def _not_a_box(mapped: Mapped, shape: tuple[int, ...]) -> str:
    return (
        f"checkpoint tensor {mapped.tensor!r} is not a box of parameter {mapped.parameter!r} {shape}: "
        f"{mapped.region}; a sharded module needs whole slices, so describe this worker with explicit regions"
    )


def regions_of(part: Part, runs: Sequence[Sequence[Run]], local_strides: Sequence[int]) -> list[Region]:
    """Return the regions of `part` in a shard that holds `runs[d]` of dimension d."""
    choices = [
        progressions(_clip(runs[d], low, low + n))
        for d, (low, n) in enumerate(zip(part.lows, part.extents, strict=True))
    ]
    regions = []
    for choice in itertools.product(*choices):
        loops: list[tuple[int, int, int]] = []
        source_offset, target_offset = part.source_offset, 0
        for d, p in enumerate(choice):
            source, target = part.source_strides[d], local_strides[d]
            source_offset += (p.start - part.lows[d]) * source
            target_offset += p.position * target
            loops.append((p.repeat, p.start_step * source, p.position_step * target))
            loops.append((p.count, source, target))
        loops = [loop for loop in loops if loop[0] > 1]
        regions.append(
            Region(
                extents=tuple(n for n, _, _ in loops),
                source=Strided(source_offset, tuple(s for _, s, _ in loops)),
                target=Strided(target_offset, tuple(t for _, _, t in loops)),
            )
        )
    return regions


def num_indices(runs: Sequence[Sequence[Run]]) -> tuple[int, ...]:
    """Return the local shape of a shard that holds `runs`."""
    return tuple(sum(run.count for run in dim) for dim in runs)
