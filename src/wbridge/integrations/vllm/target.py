"""A vLLM model as a rollout worker: in this process, or as one rank of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any  # vLLM's config objects

import torch

from wbridge.discovery.checkpoint import checkpoint_specs as specs_of_files
from wbridge.errors import LayoutError
from wbridge.ids import WorkerId
from wbridge.integrations.modules import LiveTensors
from wbridge.integrations.transformers import checkpoint_specs as specs_of_config
from wbridge.integrations.vllm.conversion import (
    assembled_map,
    converted_parameters,
    layerwise_loader,
    pack_experts,
    packed_experts,
)
from wbridge.layout.source_map import TensorSpec
from wbridge.session.endpoints import Target


def target_from_model(
    model: torch.nn.Module,
    *,
    engine: str,
    vllm_config: Any = None,
    checkpoint: Mapping[str, TensorSpec] | None = None,
    worker: WorkerId | None = None,
) -> Target:
    """Describe a vLLM model as a worker of `engine`, by default the only one.

    Where vLLM leaves parameters as they were loaded, updates are written into them in place. Where it
    has converted some (`converted_parameters`), each update is assembled and loaded as at start-up.
    `checkpoint` is read from the model's directory, or from its config, when left out; with it a model
    that is not converted needs no `vllm_config`.
    """
    checkpoint = dict(checkpoint or checkpoint_of(vllm_config))
    worker = worker or WorkerId(role="rollout", group=engine, mesh_shape=(1,), coordinate=(0,))
    parameters = LiveTensors(model, {name: name for name, _ in model.named_parameters()})
    if converted := converted_parameters(model):
        return Target(
            worker=worker,
            checkpoint=checkpoint,
            parameters=parameters,
            source_map=assembled_map(checkpoint, converted),
            load_assembled=layerwise_loader(model, vllm_config),
        )
    return Target(
        worker=worker,
        checkpoint=checkpoint,
        parameters=parameters,
        load_weights=model.load_weights,  # type: ignore[arg-type]  # every vLLM model has it
        after_apply=(lambda: pack_experts(model)) if packed_experts(model) else None,
        buffers=dict(model.named_buffers()),
    )


def target_of_rank(model: torch.nn.Module, *, engine: str, vllm_config: Any) -> Target:
    """Describe this process's rank of a running engine: its place is that in vLLM's own groups.

    Replicas of data parallelism are engines of their own, named after `engine` and their index.
    """
    from vllm.distributed import get_pp_group, get_tp_group

    parallel = vllm_config.parallel_config
    if parallel.data_parallel_size > 1:
        engine = f"{engine}.{parallel.data_parallel_index}"
    pipeline, tensor = get_pp_group(), get_tp_group()
    worker = WorkerId(
        role="rollout",
        group=engine,
        mesh_shape=(pipeline.world_size, tensor.world_size),
        coordinate=(pipeline.rank_in_group, tensor.rank_in_group),
    )
    return target_from_model(model, engine=engine, vllm_config=vllm_config, worker=worker)


def checkpoint_of(vllm_config: Any) -> dict[str, TensorSpec]:
    """Return the specs of the model's checkpoint, from its files, or from its config if it has none."""
    directory = Path(vllm_config.model_config.model)
    try:
        return specs_of_files(directory)
    except LayoutError:
        if directory.is_dir() and any(directory.glob("*.safetensors")):
            raise
        return specs_of_config(vllm_config.model_config.hf_config)
