"""Exact cover: every element of a parameter has one source, proved before a byte moves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase

import msgspec

from wbridge.errors import CoverageError, LayoutError
from wbridge.layout.algebra import subtract
from wbridge.layout.nest import Nest, target_nest
from wbridge.layout.region import Region, Strided
from wbridge.layout.sets import distinct, match
from wbridge.layout.source_map import Mapped, ParameterSpec, SourceMap


class Missing(msgspec.Struct, frozen=True):
    """Parameter elements that no region writes: how many, and the index of one."""

    num_elements: int
    example: tuple[int, ...]


class Clash(msgspec.Struct, frozen=True):
    """A parameter element written twice: by which two regions (maybe one and the same), and its index."""

    first: int
    second: int
    example: tuple[int, ...]


def uncovered(parameter: ParameterSpec, regions: Sequence[Region]) -> Missing | None:
    """Return what `regions` leave unwritten. Elements that share memory (stride 0) count once."""
    whole = _whole(parameter)
    if whole is None:
        return None
    holes = sorted(regions, key=lambda region: region.target.offset)
    rest = subtract(whole, holes, "target")
    if not rest:
        return None
    num_elements = sum(part.size for region in rest for part in distinct(target_nest(region)[0]))
    return Missing(num_elements, _unravel(min(region.source.offset for region in rest), parameter.shape))


def doubly_covered(parameter: ParameterSpec, regions: Sequence[Region]) -> Clash | None:
    """Return one parameter element that `regions` write twice, if there is any."""
    nests = []
    for index, region in enumerate(regions):
        nest, repeats = target_nest(region)
        if repeats or sum(part.size for part in distinct(nest)) < nest.size:
            return Clash(index, index, _index_of(parameter, nest.key))
        nests.append((nest.key, nest.last, index, nest))
    nests.sort()
    open_nests: list[tuple[int, int, Nest]] = []  # those whose last key is not yet passed
    for key, last, index, nest in nests:
        open_nests = [other for other in open_nests if other[0] >= key]
        for _, other_index, other in open_nests:
            common = match(other, nest)
            if common:
                first, second = sorted((other_index, index))
                return Clash(first, second, _index_of(parameter, common[0].key))
        open_nests.append((last, index, nest))
    return None


def out_of_bounds(parameter: ParameterSpec, regions: Sequence[Region]) -> int | None:
    """Return the index of a region that writes outside the parameter, such as its row padding."""
    whole = _whole(parameter)
    if whole is None:
        return 0 if regions else None
    bounds, _ = target_nest(whole)
    is_dense = len(bounds.loops) < 2 and all(s == 1 for _, s, _ in bounds.loops)
    for index, region in enumerate(regions):
        nest, _ = target_nest(region)
        if nest.key < bounds.key or nest.last > bounds.last:
            return index
        if not is_dense and subtract(region, (whole,), "target"):
            return index
    return None


def check_coverage(source_map: SourceMap, allow_unfed: Sequence[str] = ()) -> tuple[tuple[str, int], ...]:
    """Prove that each parameter element has exactly one source; return what is unfed and allowed to be.

    `allow_unfed` holds shell patterns of parameter names, such as `*.rotary_emb.*`. Opaque parameters
    are their loader's business. The result is (parameter, elements), as in `SourceMap.unfed`.

    Raises:
        CoverageError: elements without a source, with two, or outside their parameter or tensor.
    """
    by_parameter: dict[str, list[Mapped]] = {name: [] for name in source_map.parameters}
    for mapped in source_map.mapped:
        by_parameter[mapped.parameter].append(mapped)
    opaque = {target.parameter for target in source_map.opaque}
    unfed = []
    for name, mapped_to in by_parameter.items():
        _check_writes(source_map, name, mapped_to)
        if name in opaque:
            continue
        missing = _missing(source_map.parameters[name], [mapped.region for mapped in mapped_to])
        if missing is None:
            continue
        if not any(fnmatchcase(name, pattern) for pattern in allow_unfed):
            raise CoverageError(_missing_message(source_map.parameters[name], name, missing))
        unfed.append((name, missing.num_elements))
    return tuple(unfed)


def _missing(parameter: ParameterSpec, regions: Sequence[Region]) -> Missing | None:
    """As `uncovered`, for regions known to write each element of `parameter` at most once."""
    if sum(region.num_elements for region in regions) == math.prod(parameter.shape):
        return None
    return uncovered(parameter, regions)


def _missing_message(parameter: ParameterSpec, name: str, missing: Missing) -> str:
    return (
        f"parameter {name!r}: {missing.num_elements} of {math.prod(parameter.shape)} elements have no "
        f"checkpoint source, for example {missing.example}; check the name map and that the checkpoint "
        f"has every tensor, or declare the parameter in allow_unfed if nothing should write it"
    )


def _check_writes(source_map: SourceMap, name: str, mapped_to: Sequence[Mapped]) -> None:
    parameter = source_map.parameters[name]
    regions = [mapped.region for mapped in mapped_to]
    stray = out_of_bounds(parameter, regions)
    if stray is not None:
        raise CoverageError(
            f"parameter {name!r} of shape {parameter.shape} and strides {parameter.strides}: tensor "
            f"{mapped_to[stray].tensor!r} writes outside it; describe the parameter that owns the memory"
        )
    clash = doubly_covered(parameter, regions)
    if clash is not None:
        first, second = mapped_to[clash.first].tensor, mapped_to[clash.second].tensor
        raise CoverageError(
            f"parameter {name!r}: element {clash.example} is written by tensor {first!r} and again by tensor "
            f"{second!r}; leave one of them out or fix the offsets of their regions"
        )
    for mapped in mapped_to:
        _check_reads(source_map, mapped)


def _check_reads(source_map: SourceMap, mapped: Mapped) -> None:
    tensor = source_map.checkpoint[mapped.tensor]
    source = mapped.region.source
    steps = [(n - 1) * s for n, s in zip(mapped.region.extents, source.strides, strict=True)]
    first = source.offset + sum(step for step in steps if step < 0)
    last = source.offset + sum(step for step in steps if step > 0)
    if first < 0 or last >= math.prod(tensor.shape):
        raise CoverageError(
            f"parameter {mapped.parameter!r} reads elements {first} to {last} of tensor {mapped.tensor!r}, "
            f"which has {math.prod(tensor.shape)}; give the global shape of the tensor, not that of a shard"
        )


def _whole(parameter: ParameterSpec) -> Region | None:
    """Return the parameter as a region whose source is its row-major index, memory counted once."""
    if 0 in parameter.shape:
        return None
    loops = [
        (n, index_stride, s)
        for n, index_stride, s in zip(
            parameter.shape, _row_major(parameter.shape), parameter.strides, strict=True
        )
        if s and n > 1
    ]
    return Region(
        tuple([n for n, _, _ in loops]),
        source=Strided(0, tuple([i for _, i, _ in loops])),
        target=Strided(0, tuple([s for _, _, s in loops])),
    )


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for k in range(len(shape) - 2, -1, -1):
        strides[k] = strides[k + 1] * shape[k + 1]
    return tuple(strides)


def _unravel(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(index // stride % n for n, stride in zip(shape, _row_major(shape), strict=True))


def _index_of(parameter: ParameterSpec, offset: int) -> tuple[int, ...]:
    """Return the index of the element at `offset` from the parameter's first."""
    whole = _whole(parameter)
    found = match(target_nest(whole)[0], Nest(offset, 0)) if whole else []
    if not found:
        raise LayoutError(f"offset {offset} is outside a parameter of shape {parameter.shape}")
    return _unravel(found[0].left, parameter.shape)
