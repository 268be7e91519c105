"""Which indices of a dimension a shard holds, as O(1) progressions, and the regions they span."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from wbridge.layout.algebra import intersect, normalize
from wbridge.layout.region import Region, Strided


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


def shard_regions(
    runs: Sequence[Sequence[Run]], *, strides: Sequence[int], local_strides: Sequence[int]
) -> list[Region]:
    """Return the elements of a tensor that a shard holds, given the runs it holds of each dimension."""
    regions = []
    for choice in itertools.product(*(progressions(dim) for dim in runs)):
        loops: list[tuple[int, int, int]] = []
        source_offset = target_offset = 0
        for p, source, target in zip(choice, strides, local_strides, strict=True):
            source_offset += p.start * source
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


def compose(whole: Region, shard: Region) -> list[Region]:
    """Return what a shard holds of a checkpoint tensor.

    `whole` pairs the checkpoint tensor with the unsharded parameter, `shard` that parameter with its
    local part.
    """
    turned = Region(whole.extents, whole.target, whole.source)
    return [normalize(Region(o.extents, o.left, o.right)) for o in intersect(turned, shard)]


def num_indices(runs: Sequence[Sequence[Run]]) -> tuple[int, ...]:
    """Return the local shape of a shard that holds `runs`."""
    return tuple(sum(run.count for run in dim) for dim in runs)
