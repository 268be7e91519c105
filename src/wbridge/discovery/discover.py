"""Discover: from a loader to the source map of one worker."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypedDict

import msgspec
import torch

from wbridge.config import Config
from wbridge.discovery.cache import Cache, digest_of
from wbridge.discovery.pointers import Owner
from wbridge.discovery.probe import probe
from wbridge.discovery.trace import Discovered, LoadWeights, trace
from wbridge.discovery.verify import verify
from wbridge.errors import CoverageError, InternalError, LayoutError
from wbridge.layout.coverage import check_coverage
from wbridge.layout.source_map import ASSEMBLED, SourceMap, TensorSpec

_log = logging.getLogger(__name__)


def discover(
    *,
    checkpoint: Mapping[str, TensorSpec],
    parameters: Mapping[str, torch.Tensor],
    load_weights: LoadWeights,
    config: Config,
    buffers: Mapping[str, torch.Tensor] | None = None,
    owners: Mapping[str, Owner] | None = None,
    atomic: Sequence[Sequence[str]] = (),
    cache_key: Mapping[str, str] | None = None,
    method: Literal["trace", "probe"] = "trace",
) -> SourceMap:
    """Find out which checkpoint element each parameter element holds, without touching any of them.

    `buffers` are protected too, and become destinations if the loader feeds them. `owners` (see
    `pointers.owners_of`) lets replaced parameters be noticed. `atomic` lists tensors that the loader
    needs in one call. `cache_key` says what steers the loader beside its source, the shapes and
    dtypes (model config, mesh coordinate, loader options, versions of what it calls); without it, or
    without `config.cache_dir`, nothing is cached.

    Raises:
        LayoutError: the loader cannot be followed, replaces parameters, or contradicts the map.
        CoverageError: the loader leaves elements of a parameter untouched that `config.allow_unfed`
            does not name.
    """
    cache, digest = None, ""
    if config.cache_dir and cache_key is not None:
        settings = (method, config.include, config.allow_unfed, config.verify)
        key = {"atomic": atomic, "settings": settings, "key": sorted(cache_key.items())}
        tensors = {**parameters, **(buffers or {})}
        cache = Cache(config.cache_dir)
        digest = digest_of(checkpoint=checkpoint, tensors=tensors, load_weights=load_weights, key=key)
        if (cached := cache.load(digest)) is not None:
            return cached
    worker = _Worker(parameters=parameters, buffers=buffers or {}, load_weights=load_weights)
    if method == "trace":
        found = trace(checkpoint=checkpoint, **worker, owners=owners, atomic=atomic)
    else:
        found = probe(checkpoint=checkpoint, **worker, atomic=atomic)
    check_fed(found, allow_unfed=config.allow_unfed)
    check_named(found, include=config.include)
    unfed = check_coverage(found.source_map, allow_unfed=["*"])
    if dict(unfed) != dict(found.source_map.unfed):
        raise InternalError(f"{method} counts unfed elements {found.source_map.unfed}, coverage {unfed}")
    if config.verify != "off":
        verify(source_map=found.source_map, **worker, amount=config.verify, beside=found.beside_tensors)
    source_map = select(found.source_map, include=config.include)
    if cache is not None:
        cache.store(digest, source_map)
    return source_map


class _Worker(TypedDict):
    """What all ways to discover need."""

    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    load_weights: LoadWeights


def check_fed(found: Discovered, *, allow_unfed: Iterable[str]) -> None:
    """Return if the loader fills all of every parameter, or sets the rest to constants of its own.

    Raises:
        CoverageError: some parameters keep elements that no one sets; names and counts them.
    """
    allowed = tuple(allow_unfed)
    left = {n: k for n, k in found.untouched.items() if not any(fnmatch.fnmatchcase(n, p) for p in allowed)}
    if not left:
        return
    source_map = found.source_map
    used = {m.tensor for m in source_map.mapped}
    unused = [name for name in source_map.checkpoint if name not in used]
    named = ", ".join(f"{name!r} ({count} elements)" for name, count in list(left.items())[:3])
    unused_named = f", first {unused[0]!r}" if unused else ""
    raise CoverageError(
        f"load_weights leaves {len(left)} of {len(source_map.parameters)} parameters without a source: "
        f"{named}{' and more' if len(left) > 3 else ''}; {len(unused)} of {len(source_map.checkpoint)} "
        f"checkpoint tensors feed nothing{unused_named}. Match the names, or list in `allow_unfed` what may "
        "keep its values"
    )


def check_named(found: Discovered, *, include: Sequence[str]) -> None:
    """Return if the loader fills no tensor of somebody else's that would never be updated.

    Warns of checkpoint tensors that end up nowhere, as one of two names for a parameter does.

    Raises:
        LayoutError: it does; names the checkpoint tensor and says what the tensor looks like.
    """
    if lost := [name for name in found.overwritten if _is_included(name, include)]:
        _log.warning(
            "load_weights overwrites all of checkpoint tensors (fine if they are tied): %s",
            ", ".join(lost[:5]),
            extra={"tensors": lost},
        )
    source_map = found.source_map
    fed = {m.tensor for m in source_map.mapped}
    for tensor, names in found.beside:
        left = [n for n in names if n not in fed and _is_included(n, include)]
        if left:
            shape = "x".join(map(str, source_map.checkpoint[left[0]].shape)) or "scalar"
            raise LayoutError(
                f"load_weights puts checkpoint tensor {left[0]!r} ({shape}) into a {tensor.dtype} tensor that"
                " is neither in `parameters` nor in `buffers`, so no version would reach it. Give that tensor"
                " too (named_parameters() has no buffers: add named_buffers()), or leave the checkpoint"
                " tensor out with `include`"
            )


def _is_included(name: str, include: Sequence[str]) -> bool:
    return not include or any(fnmatch.fnmatchcase(name, pattern) for pattern in include)


def select(source_map: SourceMap, *, include: Sequence[str]) -> SourceMap:
    """Leave out the checkpoint tensors that match no pattern of `include`; empty means keep all.

    An opaque target stays whole if any of its tensors matches. Elements that lose their source
    count as unfed, a parameter that loses all of them is left out.
    """
    if not include:
        return source_map
    kept = {t for t in source_map.checkpoint if _is_included(t, include)}
    opaque = tuple(target for target in source_map.opaque if kept.intersection(target.tensors))
    assembled = {ASSEMBLED + tensor for target in opaque for tensor in target.tensors}
    mapped = tuple(
        m
        for m in source_map.mapped
        if (m.parameter in assembled if m.parameter.startswith(ASSEMBLED) else m.tensor in kept)
    )
    fed: dict[str, int] = {}
    for m in mapped:
        fed[m.parameter] = fed.get(m.parameter, 0) + m.region.num_elements
    opaque_names = {target.parameter for target in opaque}
    sizes = {name: torch.Size(spec.shape).numel() for name, spec in source_map.parameters.items()}
    return msgspec.structs.replace(
        source_map,
        checkpoint={t: spec for t, spec in source_map.checkpoint.items() if t in {m.tensor for m in mapped}},
        parameters={n: s for n, s in source_map.parameters.items() if n in fed or n in opaque_names},
        mapped=mapped,
        opaque=opaque,
        unfed=tuple((n, sizes[n] - k) for n, k in fed.items() if k < sizes[n]),
    )
