"""The native UCX worker: there if the extension was built where UCX's headers are, else a reason why not."""

from __future__ import annotations

import functools
import importlib
from contextlib import suppress
from types import ModuleType
from typing import TYPE_CHECKING, Final

from wbridge.errors import NativeUnavailable

if TYPE_CHECKING:
    from wbridge.native._ucx import Worker

_INTERFACE: Final = 3
"""Counts up with each change of what the extension offers, so that an old build is not used."""
_REMEDY: Final = (
    "install wbridge again where a C++ compiler is (`apt-get install g++`), "
    "`pip install -e '.[cu12]'` or `'.[cu13]'`"
)


@functools.cache
def why_missing() -> str | None:
    """Say why UCX puts are not used and what to do about it; None if they are used."""
    try:
        _load()
    except NativeUnavailable as exc:
        return str(exc)
    return None


def worker_type() -> type[Worker]:
    """Return the native worker. UCX is loaded with it: the wheel's or the system's, as libucx chooses.

    Raises:
        NativeUnavailable: it was not built, does not load or was built from other sources.
    """
    worker: type[Worker] = _load().Worker
    return worker


def _load() -> ModuleType:
    with suppress(ModuleNotFoundError):  # then the system's UCX is found, or none
        importlib.import_module("libucx").load_library()
    try:
        ucx = importlib.import_module("wbridge.native._ucx")
    except ModuleNotFoundError as exc:
        raise NativeUnavailable(f"wbridge was built without UCX's headers; {_REMEDY}") from exc
    except ImportError as exc:
        raise NativeUnavailable(
            f"the native part of the ucxx transport does not load: {exc}; {_REMEDY}"
        ) from exc
    if ucx.INTERFACE != _INTERFACE:
        raise NativeUnavailable(f"the native part of the ucxx transport is from other sources; {_REMEDY}")
    return ucx
