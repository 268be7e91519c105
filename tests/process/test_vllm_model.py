"""A vLLM model in this process takes three versions from a transformers trainer; each equals a fresh load."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import wbridge
from tests.models.checkpoints import checkpoint_of, tiny_config
from tests.models.installed import needs
from tests.models.vllm_rank import close_vllm, vllm_rank

pytestmark = [pytest.mark.backend, needs("vllm")]


@pytest.fixture(scope="module", autouse=True)
def one_process_group() -> Iterator[None]:
    yield
    close_vllm()


def build_trainer(architecture: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {k: v for k, v in tiny_config(architecture).items() if k not in ("architectures", "torch_dtype")}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=torch.float32)


def saved(model: Any) -> dict[str, torch.Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    exported: dict[str, torch.Tensor] = revert_weight_conversion(model, model.state_dict())
    return exported


@pytest.mark.parametrize("architecture", ["qwen3_tied", "qwen3_moe", "deepseek_v3", "gemma3"])
def test_c30_three_updates_equal_fresh_loads(architecture: str, tmp_path: Path) -> None:
    from wbridge.integrations.torch_dtensor import source_from_module
    from wbridge.integrations.transformers import checkpoint_map
    from wbridge.integrations.vllm.target import target_from_model

    trainer, checkpoint = build_trainer(architecture), checkpoint_of(tiny_config(architecture))
    rendezvous = f"file://{tmp_path}/rendezvous"
    sender = wbridge.sync.SenderAdapter(
        source_from_module(trainer, whole=checkpoint_map(trainer)), rendezvous=rendezvous
    )
    with vllm_rank(tiny_config(architecture), tmp_path / "model") as model, sender:
        model.load_weights(saved(trainer).items())  # sets the padding of the vocabulary, which no update does
        target = target_from_model(model, engine="rollout", checkpoint=checkpoint)
        with wbridge.sync.ReceiverAdapter(target, rendezvous=rendezvous) as receiver:
            connecting = threading.Thread(target=sender.connect)
            connecting.start()
            receiver.connect(30)
            connecting.join()
            for version in range(3):
                with torch.no_grad():
                    for parameter in trainer.parameters():
                        parameter.normal_()
                sending = threading.Thread(target=sender.send_weights, args=(version,))
                sending.start()
                update = receiver.poll_requests(wait_s=30)
                sending.join()
                assert update is not None and update.version == receiver.version == version
                taken = {name: p.detach().clone() for name, p in model.named_parameters()}
                model.load_weights(saved(trainer).items())
                for name, parameter in model.named_parameters():
                    assert torch.equal(taken[name], parameter), name
