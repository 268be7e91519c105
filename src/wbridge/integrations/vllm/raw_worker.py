"""The worker extension for CPUs that keeps weights as they were loaded, so that updates go in place."""

from __future__ import annotations

from typing import Any  # a layer to which vLLM attaches functions

import torch
import vllm.model_executor.layers.utils as layers

from wbridge.integrations.vllm.worker import WorkerExtension

__all__ = ["RawWorkerExtension"]


class RawWorkerExtension(WorkerExtension):
    """`WorkerExtension` for engines started with `engine_args(raw_weights=True)`."""


def keep_raw_weights() -> None:
    """Make linear layers use their weight itself instead of a packed copy; call before a model loads."""

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    layers.dispatch_cpu_unquantized_gemm = dispatch


keep_raw_weights()
