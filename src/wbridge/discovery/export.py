"""Trace an export: from a trainer's own conversion to checkpoint tensors, what each parameter holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from wbridge.discovery.content import Computed, Content, FromCheckpoint, Piece, View
from wbridge.discovery.specs import row_major, tensor_spec
from wbridge.discovery.traced import Traced, place_of
from wbridge.discovery.tracer import Tracer
from wbridge.discovery.watch import watching
from wbridge.errors import LayoutError
from wbridge.layout.algebra import normalize
from wbridge.layout.region import Region, Strided
from wbridge.layout.source_map import Mapped, SourceMap, TensorSpec

Export = Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]]
"""Makes checkpoint tensors of a state dict, such as the reverse of a conversion at load."""


def trace_export(*, parameters: Mapping[str, TensorSpec], export: Export) -> SourceMap:
    """Run `export` on a state dict without storage and map each parameter to what it becomes.

    `parameters` are the unsharded parameters, taken as row-major. The map's checkpoint is what
    `export` returns. Nothing is read: it works for models of any size.

    Raises:
        LayoutError: an exported tensor is computed, so no parameter holds its elements.
    """
    tracer = Tracer({})
    stand_ins = {
        name: tracer.checkpoint_tensor(name, spec, torch.device("cpu")) for name, spec in parameters.items()
    }
    with watching(tracer):
        exported = export(dict(stand_ins))
    if tracer.failure is not None:
        raise tracer.failure
    pairs = exported.items() if isinstance(exported, Mapping) else exported
    checkpoint: dict[str, TensorSpec] = {}
    mapped: list[Mapped] = []
    for name, tensor in pairs:
        checkpoint[name] = tensor_spec(tensor)
        mapped += (_held(name, piece) for piece in _pieces(name, tensor))
    return SourceMap(
        checkpoint=checkpoint,
        parameters={name: row_major(spec) for name, spec in parameters.items()},
        mapped=tuple(mapped),
        method="trace",
    )


def _pieces(name: str, tensor: torch.Tensor) -> list[Piece]:
    if not isinstance(tensor, Traced):
        raise LayoutError(
            f"exported tensor {name!r} does not come from the parameters; leave it out of the export"
        )
    if not tensor.numel():
        return []
    spec = tensor_spec(tensor)
    target = Content()
    target.write(tensor.content.read(View(spec.shape, place_of(tensor)), Strided(0, row_major(spec).strides)))
    return target.pieces()


def _held(name: str, piece: Piece) -> Mapped:
    """Turn a piece of an exported tensor around: the parameter that holds these elements."""
    if not isinstance(piece.origin, FromCheckpoint):
        how = piece.origin.operation if isinstance(piece.origin, Computed) else "a constant"
        raise LayoutError(
            f"exported tensor {name!r} is computed ({how}), so no parameter holds its elements; export "
            "what the parameters hold and leave the arithmetic to the receiver's loader"
        )
    region = piece.region
    turned = Region(region.extents, region.target, region.source)
    return Mapped(piece.origin.tensor, name, normalize(turned))
