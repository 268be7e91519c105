"""Weights that vLLM converts after loading them: finding them, and loading through vLLM's own way back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any  # vLLM's config objects, and modules' dynamic attributes

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from wbridge.discovery.specs import row_major
from wbridge.layout.region import Region, Strided
from wbridge.layout.source_map import ASSEMBLED, Mapped, OpaqueTarget, SourceMap, TensorSpec
from wbridge.session.endpoints import LoadWeights


def converted_parameters(model: torch.nn.Module) -> list[str]:
    """Return the parameters that no longer have the shape in which `load_weights` fills them."""
    converted = []
    for path, layer in model.named_modules():
        as_loaded, _ = get_layerwise_info(layer).restore_metadata
        for name, loaded in as_loaded.items():
            live = layer._parameters.get(name)
            if live is None or live.shape != loaded.shape:
                converted.append(f"{path}.{name}" if path else name)
    return converted


def assembled_map(checkpoint: Mapping[str, TensorSpec], converted: list[str]) -> SourceMap:
    """Return the map of a worker that gets whole checkpoint tensors and loads them itself, in one call."""
    parameters = {ASSEMBLED + name: row_major(spec) for name, spec in checkpoint.items()}
    mapped = []
    for name, spec in checkpoint.items():
        whole = Strided(0, parameters[ASSEMBLED + name].strides)
        if all(spec.shape):
            mapped.append(Mapped(ASSEMBLED + name, name, Region(spec.shape, whole, whole)))
    reason = f"vLLM converts {len(converted)} parameters after loading"
    opaque = OpaqueTarget(converted[0], tuple(checkpoint), reason)
    return SourceMap(
        checkpoint=dict(checkpoint),
        parameters=parameters,
        mapped=tuple(mapped),
        opaque=(opaque,),
        method="declared",
    )


def layerwise_loader(model: torch.nn.Module, vllm_config: Any) -> LoadWeights:
    """Return a loader that fills a running model as at start-up: load, convert, copy to the same memory."""

    def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        with set_current_vllm_config(vllm_config):
            initialize_layerwise_reload(model)
            model.load_weights(weights)  # type: ignore[operator]  # every vLLM model has it
            finalize_layerwise_reload(model, vllm_config.model_config)
        pack_experts(model)

    return load_weights


def packed_experts(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the expert layers whose weights the CPU kernel reads in an order of its own."""
    return [layer for layer in model.modules() if _packed_layout(layer)]


def _packed_layout(layer: torch.nn.Module) -> str:
    kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
    return str(getattr(getattr(kernel, "fused_experts", None), "isa", ""))


def pack_experts(model: torch.nn.Module) -> None:
    """Put freshly written expert weights into the order that the CPU kernel reads.

    vLLM does so at the first load only; after any later one the weights would be read scrambled.
    """
    import vllm._custom_ops as ops

    for layer in packed_experts(model):
        for name in ("w13_weight", "w2_weight"):
            live = getattr(layer, name).data
            live.copy_(ops.cpu_prepack_moe_weight(live.clone(), _packed_layout(layer)))
