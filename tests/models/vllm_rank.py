"""A rank of a tensor-parallel vLLM model in this process alone: built without an engine or peers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

for _name, _value in {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_DIST_IDENT": "wbridge-tests",
}.items():
    os.environ.setdefault(_name, _value)


@contextmanager
def vllm_rank(
    config: Mapping[str, Any],
    directory: Path,
    *,
    rank: int = 0,
    tensor_parallel: int = 1,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    rendezvous: str = "",
) -> Iterator[torch.nn.Module]:
    """Build the model that rank `rank` of `tensor_parallel` would have, with uninitialised weights.

    Building and loading use no collectives, so a group of one that reports another size is enough;
    with `rendezvous` the group is real, and every rank must be built in a process of its own.
    """
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(config)))
    engine_config = EngineArgs(
        model=str(directory),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=str(dtype).removeprefix("torch."),
        enforce_eager=True,
        distributed_executor_backend="uni",
        max_model_len=128,
    ).create_engine_config()
    engine_config.parallel_config.tensor_parallel_size = tensor_parallel
    with set_current_vllm_config(engine_config):
        real_size, real_rank = (tensor_parallel, rank) if rendezvous else (1, 0)
        if not torch.distributed.is_initialized():
            address = rendezvous or f"file://{directory}/rendezvous"
            parallel_state.init_distributed_environment(
                real_size, real_rank, address, real_rank, backend="gloo"
            )
        parallel_state.initialize_model_parallel(real_size)
        group = parallel_state.get_tp_group()
        group.world_size, group.rank_in_group = tensor_parallel, rank
        try:
            with set_default_torch_dtype(dtype), torch.device(device):
                model = initialize_model(vllm_config=engine_config)
            yield model.eval()
        finally:
            parallel_state.destroy_model_parallel()  # the groups depend on the architecture


def close_vllm() -> None:
    """End what `vllm_rank` keeps between models."""
    from vllm.distributed import parallel_state

    parallel_state.destroy_distributed_environment()
