"""Polling between engine steps, in the worker; and what the server asks a worker for."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any  # vLLM's scheduler and model outputs, passed through

import msgspec
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.v1.worker.worker_base import WorkerWrapperBase

from wbridge.integrations.vllm import BACKEND
from wbridge.integrations.vllm.transfer import BridgeTransfer
from wbridge.session.requests import ServedRequest

_KEPT_REQUESTS = 4096
"""Requests whose versions a worker remembers."""

Spans = list[tuple[int | None, int | None, int]]
"""`wbridge.VersionSpan`s as plain values, since vLLM carries nothing else between its processes."""


class ServedRequests:
    """The requests that a worker has seen last, by vLLM's ids. A unit is a token, the prompt's included."""

    def __init__(self) -> None:
        self._served: OrderedDict[str, ServedRequest] = OrderedDict()

    def advance(self, num_tokens: Mapping[str, int], begin: Callable[[], ServedRequest]) -> None:
        """Note what a step computes, while it is open; `begin` gives a record for a new request."""
        for request, count in num_tokens.items():
            served = self._served.get(request)
            if served is None:
                served = self._served[request] = begin()
            served.advance(count)
            self._served.move_to_end(request)
        while len(self._served) > _KEPT_REQUESTS:
            self._served.popitem(last=False)

    def take(self, request: str) -> Spans:
        """Return and forget the spans of a request; empty if it is unknown.

        vLLM appends a random suffix to the caller's request id: both forms are understood.
        """
        internal = next((r for r in self._served if request in (r, r.rpartition("-")[0])), None)
        spans = self._served.pop(internal).spans if internal is not None else ()
        return [msgspec.structs.astuple(span) for span in spans]


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

    def wbridge_rebind(self) -> None:
        """Take the parameters where they are now; their weights count as lost."""
        self.weight_transfer_engine.receiver.rebind()

    def wbridge_request_versions(self, request: str) -> Spans:
        """Return which versions computed a request, oldest first, and forget them."""
        served: ServedRequests | None = getattr(self, "_wbridge_served", None)
        return served.take(request) if served is not None else []

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
        if not hasattr(worker, "_wbridge_served"):
            worker._wbridge_served = ServedRequests()
        with transfer.receiver.step():
            output = execute_model(self, scheduler_output)
            worker._wbridge_served.advance(scheduler_output.num_scheduled_tokens, transfer.receiver.request)
        return output

    return polled


register()
