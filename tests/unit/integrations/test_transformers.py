"""transformers models as trainers and rollouts: fused experts, tied embeddings, traceable loaders."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.models.checkpoints import checkpoint_of, tiny_config
from tests.models.installed import needs
from wbridge.config import Config
from wbridge.discovery.discover import discover
from wbridge.errors import LayoutError
from wbridge.integrations.torch_dtensor import source_from_module
from wbridge.integrations.transformers import (
    checkpoint_map,
    checkpoint_specs,
    load_weights_into,
    target_from_model,
)

pytestmark = [pytest.mark.backend, needs("transformers")]


def config_of(architecture: str) -> Any:
    from transformers import AutoConfig

    plain = {k: v for k, v in tiny_config(architecture).items() if k not in ("architectures", "torch_dtype")}
    return AutoConfig.for_model(**plain)


def build(architecture: str, seed: int = 0) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config_of(architecture), dtype=torch.float32)


def saved(model: Any) -> dict[str, torch.Tensor]:
    """What `save_pretrained` would write."""
    from transformers.core_model_loading import revert_weight_conversion

    state = {name: p.detach() for name, p in model.named_parameters()}
    exported: dict[str, torch.Tensor] = revert_weight_conversion(model, state)
    return exported


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_tied", "qwen3_moe"])
def test_specs_come_from_a_config_alone_and_list_tied_tensors_once(architecture: str) -> None:
    wanted = checkpoint_of(tiny_config(architecture))
    assert checkpoint_specs(config_of(architecture)) == wanted
    assert checkpoint_specs(build(architecture)) == wanted


def test_c01_a_trainer_offers_a_tied_parameter_under_both_names() -> None:
    model = build("qwen3_tied")
    source = source_from_module(model, whole=checkpoint_map(model))
    assert source.checkpoint["lm_head.weight"] == source.checkpoint["model.embed_tokens.weight"]
    assert source.parameters["lm_head.weight"].data_ptr() == model.model.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_tied", "qwen3_moe"])
def test_the_loader_fills_the_whole_model_from_a_saved_checkpoint(architecture: str) -> None:
    trained, model = build(architecture, 1), build(architecture, 2)
    loaded = load_weights_into(model)(saved(trained).items())
    assert loaded == set(checkpoint_specs(model))
    for (name, wanted), found in zip(trained.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(wanted, found), name


@pytest.mark.parametrize("architecture", ["qwen3_tied", "qwen3_moe"])
def test_the_loader_can_be_watched_and_nothing_is_written(architecture: str) -> None:
    model, trained = build(architecture, 3), build(architecture, 4)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    target = target_from_model(model, engine="rollout")
    assert target.load_weights is not None
    source_map = discover(
        checkpoint=target.checkpoint,
        parameters=target.parameters,
        load_weights=target.load_weights,
        config=Config(verify="full"),
    )
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert not source_map.unfed and not source_map.opaque
    checkpoint = saved(trained)
    for m in source_map.mapped:
        live = target.parameters[m.parameter].detach()
        live.as_strided(m.region.extents, m.region.target.strides, m.region.target.offset).copy_(
            checkpoint[m.tensor]
            .contiguous()
            .clone()
            .as_strided(m.region.extents, m.region.source.strides, m.region.source.offset)
        )
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), trained.parameters(), strict=True))


def test_c13_an_unknown_name_is_refused_with_counts() -> None:
    with pytest.raises(LayoutError, match=r"'model.unknown' is not part of this model, which has \d+"):
        load_weights_into(build("qwen3"))([("model.unknown", torch.zeros(1))])


def test_a_trainer_of_fused_experts_holds_the_checkpoint_per_expert() -> None:
    model = build("qwen3_moe")
    source = source_from_module(model, whole=checkpoint_map(model))
    assert source.source_map is not None
    wanted = saved(model)
    for m in source.source_map.mapped:
        held = source.parameters[m.parameter].as_strided(
            m.region.extents, m.region.target.strides, m.region.target.offset
        )
        expected = wanted[m.tensor].contiguous().clone()
        assert torch.equal(
            held, expected.as_strided(m.region.extents, m.region.source.strides, m.region.source.offset)
        )
    assert len(source.source_map.mapped) == len(wanted)
