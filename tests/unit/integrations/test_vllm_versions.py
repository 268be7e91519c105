"""A worker remembers which version computed each request."""

from __future__ import annotations

import pytest

from tests.models.installed import needs
from wbridge.session.gate import StepGate
from wbridge.session.requests import ServedRequest
from wbridge.session.updates import Serving

pytestmark = [pytest.mark.backend, needs("vllm")]


class Begins:
    """Gives out records of requests served by weights that a test sets."""

    def __init__(self) -> None:
        self.serving = Serving()
        self.gate = StepGate()

    def __call__(self) -> ServedRequest:
        return ServedRequest(self)  # type: ignore[arg-type]  # has what a request looks at


def test_spans_join_steps_of_one_version_and_are_given_once() -> None:
    from wbridge.integrations.vllm.worker import ServedRequests

    begin, requests = Begins(), ServedRequests()
    requests.advance({"a-12345678": 5, "b": 2}, begin)
    begin.serving = Serving(3, 1)
    requests.advance({"a-12345678": 1}, begin)
    requests.advance({"a-12345678": 1, "b": 1}, begin)
    assert requests.take("a") == [(None, None, 5), (3, 1, 2)]
    assert requests.take("a") == []
    assert requests.take("b") == [(None, None, 2), (3, 1, 1)]


def test_old_requests_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    from wbridge.integrations.vllm import worker

    monkeypatch.setattr(worker, "_KEPT_REQUESTS", 2)
    begin, requests = Begins(), worker.ServedRequests()
    for request in ("a", "b", "a", "c"):
        requests.advance({request: 1}, begin)
    assert requests.take("b") == []
    assert requests.take("a") == [(None, None, 2)]


def test_registering_twice_is_harmless_and_names_are_importable() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from wbridge.integrations.vllm import BACKEND, engine_args, register

    register()
    register()
    assert BACKEND in WeightTransferEngineFactory._registry
    extension = resolve_obj_by_qualname(engine_args()["worker_extension_cls"])
    assert extension.wbridge_poll is not None
