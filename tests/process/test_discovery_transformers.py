"""Real transformers models: in-memory parameters to checkpoint tensors, tied, untied and fused experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.models.checkpoints import checkpoint_of, tiny_config
from tests.models.installed import needs
from tests.models.replay import replay
from wbridge.config import Config
from wbridge.discovery.discover import discover
from wbridge.discovery.export import trace_export
from wbridge.discovery.specs import specs_of

pytestmark = [pytest.mark.backend, needs("transformers")]


def build(architecture: str, device: str = "cpu", **changes: Any) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {k: v for k, v in tiny_config(architecture).items() if k not in ("architectures", "torch_dtype")}
    with torch.device(device):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**(config | changes)))
    return model


def export(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    exported: dict[str, torch.Tensor] = revert_weight_conversion(model, tensors)
    return exported


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_tied", "qwen3_moe"])
def test_saved_checkpoint_holds_what_the_map_says(architecture: str) -> None:
    model = build(architecture)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    source_map = trace_export(parameters=specs_of(parameters), export=lambda t: export(model, t))
    assert source_map.checkpoint == checkpoint_of(tiny_config(architecture))
    assert len(source_map.mapped) == len(source_map.checkpoint)
    w = {name: torch.zeros_like(p) for name, p in parameters.items()}
    replay(source_map, export(model, parameters), w)
    assert all(torch.equal(w[name], parameters[name]) for name in w)


def test_fused_experts_of_a_large_model_on_meta() -> None:
    model = build("qwen3_moe", "meta", hidden_size=2048, num_experts=128, moe_intermediate_size=768)
    parameters = dict(model.named_parameters())
    fused = [name for name, p in parameters.items() if p.dim() == 3]
    assert len(fused) == 4
    source_map = trace_export(parameters=specs_of(parameters), export=lambda t: export(model, t))
    assert sum(m.parameter in fused for m in source_map.mapped) == 2 * 128 * 3
    assert sum(m.region.num_elements for m in source_map.mapped) == sum(
        p.numel() for p in parameters.values()
    )


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_tied"])
def test_loader_of_a_plain_module_is_traced(architecture: str) -> None:
    model = build(architecture)
    parameters = dict(model.named_parameters())

    def load_weights(pairs: Any) -> None:
        model.load_state_dict(dict(pairs), strict=False)

    source_map = discover(
        checkpoint=checkpoint_of(tiny_config(architecture)),
        parameters=parameters,
        buffers=dict(model.named_buffers()),
        load_weights=load_weights,
        config=Config(verify="full"),
    )
    assert {m.parameter: m.tensor for m in source_map.mapped} == {name: name for name in parameters}
    assert source_map.unfed == ()
