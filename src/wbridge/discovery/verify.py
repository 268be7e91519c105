"""Verify: replay a source map against one real `load_weights` on random data, bit for bit."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import torch

from wbridge.discovery.shadow import Shadows
from wbridge.discovery.specs import torch_dtype
from wbridge.discovery.trace import LoadWeights
from wbridge.discovery.traced import storage_key
from wbridge.discovery.tracer import Tracer
from wbridge.discovery.watch import watching
from wbridge.errors import LayoutError
from wbridge.layout.region import Region, Strided
from wbridge.layout.source_map import ASSEMBLED, Mapped, SourceMap, TensorSpec


def verify(
    *,
    source_map: SourceMap,
    parameters: Mapping[str, torch.Tensor],
    load_weights: LoadWeights,
    buffers: Mapping[str, torch.Tensor] | None = None,
    amount: Literal["sample", "full"] = "sample",
    beside: Sequence[torch.Tensor] = (),
) -> int:
    """Return how many checkpoint tensors were replayed; 0 when the parameters have no memory.

    The loader writes into shadows of the parameters that are looked at and nowhere else: `beside` has the
    tensors that it fills without their being parameters or buffers. A sample
    has every tensor class (name without digits, shape, dtype) once, with all tensors that share a
    parameter with one; the rest of the checkpoint is traced, not materialised. What a probe found
    is always replayed in full, since its loader may look at values.

    Raises:
        LayoutError: the loader put something else there; names the parameter and the first index.
    """
    live = {**parameters, **(buffers or {})}
    if any(tensor.is_meta for tensor in live.values()):
        return 0
    mapped = [m for m in source_map.mapped if not m.parameter.startswith(ASSEMBLED)]
    chosen = {m.tensor for m in mapped}
    if amount == "sample" and source_map.method == "trace":
        sample = _sample(source_map, mapped)
        if _replay(source_map, mapped, live, load_weights, sample, beside):
            return len(sample)
    _replay(source_map, mapped, live, load_weights, chosen | set(source_map.checkpoint), beside)
    return len(chosen)


def _sample(source_map: SourceMap, mapped: list[Mapped]) -> set[str]:
    feeds: dict[str, set[str]] = {}
    fed: dict[str, set[str]] = {}
    for m in mapped:
        feeds.setdefault(m.tensor, set()).add(m.parameter)
        fed.setdefault(m.parameter, set()).add(m.tensor)
    classes: dict[tuple[str, TensorSpec], str] = {}
    for tensor in feeds:
        classes.setdefault((re.sub(r"\d+", "", tensor), source_map.checkpoint[tensor]), tensor)
    chosen = {other for tensor in classes.values() for parameter in feeds[tensor] for other in fed[parameter]}
    for names in source_map.atomic:
        if chosen.intersection(names):
            chosen.update(names)
    return chosen


def _replay(
    source_map: SourceMap,
    mapped: list[Mapped],
    live: Mapping[str, torch.Tensor],
    load_weights: LoadWeights,
    chosen: set[str],
    beside: Sequence[torch.Tensor],
) -> bool:
    """Compare what the map says with what the loader does.

    Returns False if the sample was no basis for that: the loader mixed its tensors with others.
    """
    is_full = chosen.issuperset(source_map.checkpoint)
    wanted = {m.parameter for m in mapped if m.tensor in chosen}
    storages = {storage_key(live[name]) for name in wanted}
    touched = {n: t for n, t in live.items() if is_full or storage_key(t) in storages}
    tracer = Tracer({n: t for n, t in live.items() if n not in touched})
    shadows = Shadows([*touched.values(), *beside])
    device = next(iter(live.values())).device if live else torch.device("cpu")

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, spec in source_map.checkpoint.items():
            if name in chosen:
                yield name, shadows.carry(_random(name, spec, device))
            else:
                yield name, tracer.checkpoint_tensor(name, spec, device)

    try:
        with watching(tracer, shadows):
            load_weights(weights())
    except LayoutError:
        raise
    except Exception as exc:  # foreign code: whatever it raises means that it cannot be replayed
        raise LayoutError(
            f"load_weights failed on random data: {type(exc).__name__}: {exc}. If it accepts only real "
            "weights, set verify = 'off'"
        ) from exc
    loaded = {name: shadows.of(tensor) for name, tensor in touched.items()}
    if not is_full and any(tracer.was_written(tensor) for tensor in loaded.values()):
        return False
    _compare(source_map, [m for m in mapped if m.tensor in chosen], loaded)
    return True


def _compare(source_map: SourceMap, mapped: list[Mapped], loaded: Mapping[str, torch.Tensor]) -> None:
    by_tensor: dict[str, list[Mapped]] = {}
    for m in mapped:
        by_tensor.setdefault(m.tensor, []).append(m)
    for tensor, regions in by_tensor.items():
        device = loaded[regions[0].parameter].device
        flat = _random(tensor, source_map.checkpoint[tensor], device).reshape(-1)
        for m in regions:
            found = loaded[m.parameter]
            expected = _view(flat, m.region.extents, m.region.source).to(found.dtype)
            actual = _view(found, m.region.extents, m.region.target, int(found.storage_offset()))
            if not torch.equal(_bits(expected), _bits(actual)):
                raise _mismatch(m, found, expected, actual)


def _view(tensor: torch.Tensor, extents: tuple[int, ...], place: Strided, base: int = 0) -> torch.Tensor:
    return tensor.as_strided(extents, place.strides, base + place.offset)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def _mismatch(
    m: Mapped, parameter: torch.Tensor, expected: torch.Tensor, actual: torch.Tensor
) -> LayoutError:
    wrong = (_bits(expected) != _bits(actual)).view(expected.numel(), -1).any(1)
    at = int(wrong.nonzero()[0])
    index = _parameter_index(m.region, parameter, at)
    return LayoutError(
        f"the source map is wrong for parameter {m.parameter!r}: element {index} should hold "
        f"{expected.reshape(-1)[at].item()} of checkpoint tensor {m.tensor!r}, but load_weights put "
        f"{actual.reshape(-1)[at].item()} there. The loader depends on values or on earlier calls; "
        "declare the map"
    )


def _parameter_index(region: Region, parameter: torch.Tensor, at: int) -> tuple[int, ...]:
    """Find the parameter index of the `at`-th element of a region."""
    offset = region.target.offset
    for n, stride in zip(reversed(region.extents), reversed(region.target.strides), strict=True):
        at, i = divmod(at, n)
        offset += i * stride
    index = [0] * parameter.dim()
    for dim in sorted(range(parameter.dim()), key=parameter.stride, reverse=True):
        if parameter.stride(dim):
            index[dim], offset = divmod(offset, parameter.stride(dim))
    return tuple(index)


_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _random(name: str, spec: TensorSpec, device: torch.device) -> torch.Tensor:
    """Return the same data for the same name, without keeping it: finite floats near 1, any integers."""
    dtype = torch_dtype(spec.dtype)
    part = torch.float32 if dtype is torch.complex64 else dtype
    count = math.prod(spec.shape) * dtype.itemsize // part.itemsize
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    entropy = torch.empty(count * part.itemsize // 8 + 1, dtype=torch.int64, device=device)
    raw = entropy.random_(-(2**63), None, generator=generator).view(_WORDS[part.itemsize])[:count]
    if part is torch.bool:
        raw &= 1
    elif part.is_floating_point:
        mantissa_bits = round(-math.log2(torch.finfo(part).eps))
        top_exponent_bit = 1 << (8 * part.itemsize - 2)
        raw &= ~top_exponent_bit
        raw |= top_exponent_bit - (4 << mantissa_bits)  # all others but the last two
    return raw.view(dtype).view(spec.shape)
