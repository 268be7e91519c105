"""Why the extension is not used, in words, whatever is wrong with it."""

from __future__ import annotations

import importlib
import types
from collections.abc import Iterator

import pytest

from wbridge.errors import NativeUnavailable
from wbridge.native import extension


@pytest.fixture(autouse=True)
def asked_afresh() -> Iterator[None]:
    extension.why_missing.cache_clear()
    yield
    extension.why_missing.cache_clear()


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (ModuleNotFoundError("No module named 'wbridge.native._core'"), "was not built"),
        (ImportError("undefined symbol: x"), "does not load: undefined symbol: x"),
        (types.SimpleNamespace(INTERFACE=0), "was built from other sources"),
    ],
)
def test_the_reason_comes_with_its_remedy(
    found: object, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def import_module(name: str) -> object:
        if isinstance(found, ImportError):
            raise found
        return found

    monkeypatch.setattr(importlib, "import_module", import_module)
    why = extension.why_missing()
    assert why is not None and reason in why and "pip install" in why
    with pytest.raises(NativeUnavailable, match="pip install"):
        extension.table_type()
    extension.set_copy_threads(2)
