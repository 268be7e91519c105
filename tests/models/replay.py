"""Apply a source map by hand, and compare with what the loader really does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from wbridge.discovery.specs import specs_of
from wbridge.discovery.trace import Discovered, trace
from wbridge.layout.source_map import ASSEMBLED, SourceMap

Weights = Mapping[str, torch.Tensor]


def from_dict(load: Callable[[Weights], object]) -> Callable[[Iterable[tuple[str, torch.Tensor]]], object]:
    """Make a `load_weights` of a loader that wants all tensors at once."""
    return lambda pairs: load(dict(pairs))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def copies(parameters: Weights) -> dict[str, torch.Tensor]:
    """Copy values, strides and sharing of storage are those of the originals."""
    storages: dict[int, torch.Tensor] = {}
    result = {}
    for name, p in parameters.items():
        storage = p.untyped_storage()
        base = storages.setdefault(storage._cdata, torch.empty(0, dtype=torch.uint8).set_(storage.clone()))
        result[name] = torch.empty(0, dtype=p.dtype).set_(
            base.untyped_storage(), p.storage_offset(), p.shape, p.stride()
        )
    return result


def replay(source_map: SourceMap, weights: Weights, parameters: Weights) -> None:
    """Write what the map says into `parameters`."""
    for m in source_map.mapped:
        if m.parameter.startswith(ASSEMBLED):
            continue
        source, target, parameter = m.region.source, m.region.target, parameters[m.parameter].detach()
        read = (
            weights[m.tensor].reshape(-1).clone().as_strided(m.region.extents, source.strides, source.offset)
        )
        start = int(parameter.storage_offset()) + target.offset
        parameter.as_strided(m.region.extents, target.strides, start).copy_(read)


def traced(
    weights: Weights,
    parameters: dict[str, torch.Tensor],
    load: Callable[[Weights], object],
    buffers: Weights | None = None,
) -> Discovered:
    """Trace and check that no live value changed."""
    live = {**parameters, **(buffers or {})}
    before = {name: bits(tensor).clone() for name, tensor in live.items()}
    found = trace(
        checkpoint=specs_of(weights), parameters=parameters, load_weights=from_dict(load), buffers=buffers
    )
    assert all(torch.equal(bits(tensor), before[name]) for name, tensor in live.items())
    return found


def assert_exact(
    found: Discovered, weights: Weights, parameters: Weights, load: Callable[[Weights], object]
) -> SourceMap:
    """Check that the replayed map equals the real load bit for bit, then keep the loaded values."""
    expected = copies(parameters)
    replay(found.source_map, weights, expected)
    with torch.no_grad():
        load(weights)
    opaque = {target.parameter for target in found.source_map.opaque}
    for name, tensor in parameters.items():
        assert name in opaque or torch.equal(bits(tensor), bits(expected[name])), name
    return found.source_map
