"""The compiled extension: there if it was built from these sources, else a reason why not."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Final

from wbridge.errors import NativeUnavailable

if TYPE_CHECKING:
    from wbridge.native._core import Places, Table

_INTERFACE: Final = 3
"""Counts up with each change of what the extension offers, so that an old build is not used."""
_REMEDY: Final = "install wbridge again where a C++ compiler is (`apt-get install g++`), `pip install -e .`"


@functools.cache
def why_missing() -> str | None:
    """Say why the extension is not used and what to do about it; None if it is used."""
    try:
        _load()
    except NativeUnavailable as exc:
        return str(exc)
    return None


def table_type() -> type[Table]:
    """Return the native table of strided copies.

    Raises:
        NativeUnavailable: the extension was not built, does not load or was built from other sources.
    """
    table: type[Table] = _load().Table
    return table


def places_type() -> type[Places]:
    """Return the native record of where tensors lie.

    Raises:
        NativeUnavailable: as above.
    """
    places: type[Places] = _load().Places
    return places


def num_copy_threads() -> int:
    """Return how many threads one native copy uses at most, the calling one included."""
    num_threads: int = _load().num_threads()
    return num_threads


def set_copy_threads(num_threads: int) -> None:
    """Bound the threads of one native copy, the calling one included, in the whole process.

    They start with the first large copy and sleep between copies. At first the bound is the number of
    cores, but at most 4. Without the extension this does nothing: torch copies with threads of its own.
    """
    if why_missing() is None:
        _load().set_num_threads(num_threads)


def ring_address() -> int:
    """Return the address of a C function `void ring(void *eventfd)` that wakes whoever polls the eventfd.

    It needs no GIL, does not block and calls nothing else, so a device driver may call it.

    Raises:
        NativeUnavailable: as above.
    """
    address: int = _load().ring_address()
    return address


def _load() -> ModuleType:
    try:
        core = importlib.import_module("wbridge.native._core")
    except ModuleNotFoundError as exc:
        raise NativeUnavailable(f"the extension was not built; {_REMEDY}") from exc
    except ImportError as exc:
        raise NativeUnavailable(f"the extension does not load: {exc}; {_REMEDY}") from exc
    if core.INTERFACE != _INTERFACE:
        raise NativeUnavailable(f"the extension was built from other sources; {_REMEDY}")
    return core
