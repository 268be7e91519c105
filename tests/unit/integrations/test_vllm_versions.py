"""A worker remembers which version computed each request."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.backend
pytest.importorskip("vllm")


def test_spans_join_steps_of_one_version_and_are_given_once() -> None:
    from wbridge.integrations.vllm.worker import RequestVersions

    versions = RequestVersions()
    versions.record(None, {"a-12345678": 5, "b": 2})
    versions.record(3, {"a-12345678": 1})
    versions.record(3, {"a-12345678": 1, "b": 1})
    assert versions.take("a") == [(None, 5), (3, 2)]
    assert versions.take("a") == []
    assert versions.take("b") == [(None, 2), (3, 1)]


def test_old_requests_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    from wbridge.integrations.vllm import worker

    monkeypatch.setattr(worker, "_KEPT_REQUESTS", 2)
    versions = worker.RequestVersions()
    for request in ("a", "b", "a", "c"):
        versions.record(1, {request: 1})
    assert versions.take("b") == []
    assert versions.take("a") == [(1, 2)]


def test_registering_twice_is_harmless_and_names_are_importable() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from wbridge.integrations.vllm import BACKEND, engine_args, register

    register()
    register()
    assert BACKEND in WeightTransferEngineFactory._registry
    extension = resolve_obj_by_qualname(engine_args()["worker_extension_cls"])
    assert extension.wbridge_poll is not None
