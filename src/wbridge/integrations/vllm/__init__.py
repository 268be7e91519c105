"""vLLM: engines that follow a trainer between their steps, without a change to vLLM itself.

Modules, from the model outward: `target` (a vLLM model as a rollout worker), `conversion` (weights that
vLLM repacks after loading), `transfer` (the registered weight-transfer backend), `worker` (polling
between engine steps), `raw_worker` (the same with unpacked weights on a CPU), `server` (an `AsyncLLM`).
"""

from __future__ import annotations

from typing import Any  # vLLM's arguments are whatever its EngineArgs takes

BACKEND = "wbridge"
"""The name under which the backend is registered in vLLM."""

_WORKER = "wbridge.integrations.vllm.worker.WorkerExtension"
_RAW_WORKER = "wbridge.integrations.vllm.raw_worker.RawWorkerExtension"


def engine_args(*, raw_weights: bool = False) -> dict[str, Any]:
    """Return the arguments of `LLM` or `AsyncEngineArgs` that make an engine follow a trainer.

    On a CPU vLLM repacks linear layers after loading; `raw_weights` keeps them as they are, so that
    updates are written in place instead of being loaded anew.
    """
    return {
        "weight_transfer_config": {"backend": BACKEND},
        "worker_extension_cls": _RAW_WORKER if raw_weights else _WORKER,
    }


def register() -> None:
    """Register the backend and the polling in this process; usable as a `vllm.general_plugins` entry."""
    from wbridge.integrations.vllm import worker

    worker.register()
