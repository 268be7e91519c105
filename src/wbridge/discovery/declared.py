"""Declared: source maps from explicit boxes or regions, for workers without a loader to watch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import torch

from wbridge.discovery.content import bounds
from wbridge.discovery.specs import parameter_spec, row_major
from wbridge.errors import LayoutError
from wbridge.layout.coverage import uncovered
from wbridge.layout.region import Region, Strided
from wbridge.layout.source_map import Mapped, ParameterSpec, SourceMap, TensorSpec


class Shard(msgspec.Struct, frozen=True):
    """A box of a global tensor and the box of a local parameter that holds it, of the same sizes.

    `starts` are global indices; `local_starts` are indices in this worker's parameter, all zero when
    left out. The global shape is never stated here: it is the checkpoint's.
    """

    parameter: str
    tensor: str
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    local_starts: tuple[int, ...] = ()


def declare(
    *,
    checkpoint: Mapping[str, TensorSpec],
    parameters: Mapping[str, torch.Tensor],
    shards: Iterable[Shard] = (),
    regions: Iterable[Mapped] = (),
    atomic: Iterable[Iterable[str]] = (),
) -> SourceMap:
    """Build the source map that these boxes and regions describe. Empty boxes are dropped.

    Raises:
        LayoutError: a name is unknown, or a box or region reaches outside its tensor or parameter.
    """
    specs = {name: parameter_spec(tensor) for name, tensor in parameters.items()}
    mapped = [m for shard in shards if (m := _whole_box(shard, checkpoint, specs)) is not None]
    for m in regions:
        _check_region(m, checkpoint, specs)
        mapped.append(m)
    return _source_map(checkpoint, specs, mapped, atomic)


def _source_map(
    checkpoint: Mapping[str, TensorSpec],
    specs: Mapping[str, ParameterSpec],
    mapped: list[Mapped],
    atomic: Iterable[Iterable[str]],
) -> SourceMap:
    regions: dict[str, list[Region]] = {name: [] for name in specs}
    for m in mapped:
        regions[m.parameter].append(m.region)
    missing = {name: uncovered(spec, regions[name]) for name, spec in specs.items()}
    return SourceMap(
        checkpoint=dict(checkpoint),
        parameters=dict(specs),
        mapped=tuple(mapped),
        atomic=tuple(tuple(names) for names in atomic),
        unfed=tuple((name, m.num_elements) for name, m in missing.items() if m is not None),
        method="declared",
    )


def _whole_box(
    shard: Shard, checkpoint: Mapping[str, TensorSpec], specs: Mapping[str, ParameterSpec]
) -> Mapped | None:
    region = _box(shard, {name: row_major(spec) for name, spec in checkpoint.items()}, specs)
    return None if region is None else Mapped(shard.parameter, shard.tensor, region)


def _box(
    shard: Shard, sources: Mapping[str, ParameterSpec], specs: Mapping[str, ParameterSpec]
) -> Region | None:
    if shard.tensor not in sources or shard.parameter not in specs:
        unknown = shard.tensor if shard.tensor not in sources else shard.parameter
        raise LayoutError(f"{shard} names {unknown!r}, which is neither in the checkpoint nor a parameter")
    source, target = sources[shard.tensor], specs[shard.parameter]
    local_starts = shard.local_starts or (0,) * len(shard.sizes)
    for starts, shape, what in (
        (shard.starts, source.shape, "global"),
        (local_starts, target.shape, "local"),
    ):
        fits = len(starts) == len(shape) == len(shard.sizes) and all(
            start >= 0 and size >= 0 and start + size <= n
            for start, size, n in zip(starts, shard.sizes, shape, strict=True)
        )
        if not fits:
            raise LayoutError(f"{shard} reaches outside the {what} shape {shape}; starts are {what} indices")
    if 0 in shard.sizes:
        return None
    return Region(
        shard.sizes,
        Strided(_offset(shard.starts, source.strides), source.strides),
        Strided(_offset(local_starts, target.strides), target.strides),
    )


def _offset(starts: Iterable[int], strides: Iterable[int]) -> int:
    return sum(start * stride for start, stride in zip(starts, strides, strict=True))


def _check_region(
    m: Mapped, checkpoint: Mapping[str, TensorSpec], specs: Mapping[str, ParameterSpec]
) -> None:
    if m.tensor not in checkpoint or m.parameter not in specs:
        unknown = m.tensor if m.tensor not in checkpoint else m.parameter
        raise LayoutError(f"a region names {unknown!r}, which is neither in the checkpoint nor a parameter")
    target = specs[m.parameter]
    ends = _offset((max(n - 1, 0) for n in target.shape), target.strides)
    for place, last, what in (
        (m.region.source, torch.Size(checkpoint[m.tensor].shape).numel() - 1, f"tensor {m.tensor!r}"),
        (m.region.target, ends, f"parameter {m.parameter!r}"),
    ):
        low, high = bounds(m.region.extents, place)
        if low < 0 or high > last:
            raise LayoutError(
                f"a region of {what} reaches elements {low}..{high}, outside 0..{last}: {m.region}"
            )
