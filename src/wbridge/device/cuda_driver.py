"""The driver calls that torch does not offer, through cuda.bindings; all for one GPU's primary context."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

from wbridge.errors import NativeUnavailable
from wbridge.native import require
from wbridge.native.extension import ring_address

_NON_BLOCKING: Final = 1
"""CU_STREAM_NON_BLOCKING: no order with the default stream, which is the application's."""

_RELAXED: Final = "CU_STREAM_CAPTURE_MODE_RELAXED"


class DriverError(RuntimeError):
    """A call of the CUDA driver failed."""


@functools.cache
def why_missing() -> str | None:
    """Say why these calls cannot be made and what to do about it; None if they can."""
    try:
        call("cuInit", 0)
    except (NativeUnavailable, RuntimeError) as exc:  # cuda.bindings finds no driver, or it does not start
        return str(exc)
    return None


@functools.cache
def why_no_rings() -> str | None:
    """Say why streams cannot ring for the event loop; None if they can."""
    try:
        ring_address()
    except NativeUnavailable as exc:
        return str(exc)
    return why_missing()


def call(name: str, *arguments: Any) -> Any:  # the bindings have no hints
    """Call the driver and return what it returns besides the code.

    Raises:
        DriverError: the call failed; names it and the code.
    """
    bindings = _bindings()
    code, *results = getattr(bindings, name)(*arguments)
    if code != bindings.CUresult.CUDA_SUCCESS:
        raise DriverError(f"{name} failed with {getattr(code, 'name', code)}")
    return results[0] if results else None


def attribute(index: int, name: str) -> int:
    """Return an attribute of a GPU."""
    which = constant("CUdevice_attribute", name)
    return int(call("cuDeviceGetAttribute", which, call("cuDeviceGet", index)))


def entrance(index: int) -> tuple[int, int]:
    """Return the address of the C function that makes a context that of the thread that calls it, and as its
    argument the GPU's.

    Raises:
        DriverError: the driver has no such function.
    """
    try:
        set_current = ctypes.CDLL("libcuda.so.1").cuCtxSetCurrent
    except (OSError, AttributeError) as exc:
        raise DriverError(str(exc)) from exc
    address = ctypes.cast(set_current, ctypes.c_void_p).value
    assert address is not None
    return address, int(_primary_context(index))


def constant(enumeration: str, name: str) -> Any:  # as above
    return getattr(getattr(_bindings(), enumeration), name)


def struct(name: str) -> Any:  # as above
    return getattr(_bindings(), name)()


@contextmanager
def relaxed() -> Iterator[None]:
    """Let the calling thread do what the driver forbids to all threads while one captures a graph.

    What is done must not concern the captured streams. Otherwise the capture would fail, and so would this.
    """
    if why_missing() is not None:
        yield
        return
    before = call("cuThreadExchangeStreamCaptureMode", constant("CUstreamCaptureMode", _RELAXED))
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", before)


@contextmanager
def current(index: int) -> Iterator[None]:
    """Make the GPU's primary context, which is torch's too, that of the calling thread; `relaxed`."""
    with relaxed():
        call("cuCtxPushCurrent", _primary_context(index))
        try:
            yield
        finally:
            call("cuCtxPopCurrent")


def ring_behind(index: int, stream: int, descriptor: int) -> None:
    """Write the eventfd when everything submitted to `stream` so far is over: by the driver, without the GIL.

    If the GPU fails, nothing is written.
    """
    with current(index):
        call("cuLaunchHostFunc", stream, _ring(), descriptor)


class _IdleStreams:
    """Streams of the process that nobody uses now.

    They are never destroyed: torch's allocators may still record an event on one when they get memory back
    that was used there. The streams of torch itself are a few that everybody shares.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handles: dict[tuple[int, int], list[int]] = {}

    def take(self, index: int, priority: int) -> int:
        with self._lock:
            if handles := self._handles.get((index, priority)):
                return handles.pop()
        with current(index):
            return int(call("cuStreamCreateWithPriority", _NON_BLOCKING, priority))

    def give_back(self, index: int, priority: int, handle: int) -> None:
        with self._lock:
            self._handles.setdefault((index, priority), []).append(handle)


IDLE_STREAMS: Final = _IdleStreams()


@functools.cache
def _bindings() -> ModuleType:
    return require("cuda.bindings.driver")


@functools.cache
def _ring() -> Any:  # as above
    return _bindings().CUhostFn(ring_address())


@functools.cache
def _primary_context(index: int) -> Any:  # as above
    call("cuInit", 0)
    return call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", index))
