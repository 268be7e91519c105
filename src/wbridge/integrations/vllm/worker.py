"""Polling between engine steps, in the worker; and what the server asks a worker for."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any  # vLLM's scheduler and model outputs, passed through

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.v1.worker.worker_base import WorkerWrapperBase

from wbridge.integrations.vllm import BACKEND
from wbridge.integrations.vllm.transfer import BridgeTransfer

_KEPT_REQUESTS = 4096
"""Finished requests whose versions a worker remembers."""

VersionSpan = tuple[int | None, int]
"""(version, number of tokens computed with it, the prompt's included)."""


class RequestVersions:
    """Which version computed how many tokens of each request, for the requests seen last."""

    def __init__(self) -> None:
        self._spans: OrderedDict[str, list[VersionSpan]] = OrderedDict()

    def record(self, version: int | None, num_tokens: dict[str, int]) -> None:
        """Note one engine step: the tokens scheduled for each request ran with `version`."""
        for request, count in num_tokens.items():
            spans = self._spans.setdefault(request, [])
            if spans and spans[-1][0] == version:
                spans[-1] = (version, spans[-1][1] + count)
            else:
                spans.append((version, count))
            self._spans.move_to_end(request)
        while len(self._spans) > _KEPT_REQUESTS:
            self._spans.popitem(last=False)

    def take(self, request: str) -> list[VersionSpan]:
        """Return and forget the spans of a request; empty if it is unknown.

        vLLM appends a random suffix to the caller's request id: both forms are understood.
        """
        internal = next((r for r in self._spans if request in (r, r.rpartition("-")[0])), None)
        return self._spans.pop(internal) if internal is not None else []


class WorkerExtension:
    """Methods that appear on vLLM's worker, for `collective_rpc`; named in `worker_extension_cls`."""

    weight_transfer_engine: Any

    def wbridge_poll(self, wait_s: float | None = None) -> int | None:
        """Poll outside of a step, for an idle engine; return the version of the weights, if any."""
        transfer = self.weight_transfer_engine
        if not isinstance(transfer, BridgeTransfer) or transfer.receiver is None:
            return None
        transfer.poll(wait_s)
        return transfer.receiver.version

    def wbridge_request_versions(self, request: str) -> list[VersionSpan]:
        """Return which versions computed a request, oldest first, and forget them."""
        versions: RequestVersions | None = getattr(self, "_wbridge_versions", None)
        return versions.take(request) if versions is not None else []

    def wbridge_counters(self) -> dict[str, int]:
        """Return the transport's counters of this worker."""
        return dict(self.weight_transfer_engine.receiver.counters)


def register() -> None:
    """Make vLLM know the backend, and poll before each step of a worker that uses it. Idempotent."""
    if BACKEND in WeightTransferEngineFactory._registry:
        return
    WeightTransferEngineFactory.register_engine(BACKEND, BridgeTransfer)
    # The wrapper is the one place through which every executor runs a worker's step.
    WorkerWrapperBase.execute_model = _polling(WorkerWrapperBase.execute_model)


def _polling(execute_model: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(execute_model)
    def polled(self: Any, scheduler_output: Any) -> Any:
        worker = self.worker
        transfer = worker.weight_transfer_engine
        if not isinstance(transfer, BridgeTransfer) or transfer.receiver is None:
            return execute_model(self, scheduler_output)
        transfer.poll()
        with transfer.receiver.step() as version:
            output = execute_model(self, scheduler_output)
        if not hasattr(worker, "_wbridge_versions"):
            worker._wbridge_versions = RequestVersions()
        worker._wbridge_versions.record(version, scheduler_output.num_scheduled_tokens)
        return output

    return polled


register()
