"""Device memory that UCX reads and writes, on a machine without a GPU: to UCX it is the host's."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest

from tests.models.far import FarBuffer, FarDevice
from wbridge.device.base import MemoryKind
from wbridge.device.cpu import CpuBuffer
from wbridge.errors import DeviceFailed
from wbridge.native.ucx import worker_type
from wbridge.transport import ucx_native


class NetworkedDevice(FarDevice):
    """Like `FarDevice`, but a network may follow the addresses of its memory."""

    def allocate(self, nbytes: int, kind: MemoryKind, *, shared: bool = False) -> CpuBuffer:
        buffer = super().allocate(nbytes, kind, shared=shared)
        return NetworkedBuffer(buffer) if isinstance(buffer, FarBuffer) else buffer


class NetworkedBuffer(FarBuffer):
    def __init__(self, buffer: FarBuffer) -> None:
        self._far, self._bytes = buffer._far, buffer._bytes
        self._addresses = memoryview(buffer.tensor.numpy())


class Gpu:
    """Implements `NetworkedGpu`, and counts."""

    def __init__(self) -> None:
        self.threads: list[int] = []
        """Those that have entered."""
        self.code = 0
        """What entering returns."""
        self.num_settled = 0
        self.has_failed = False
        self._function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._enter)

    @property
    def entrance(self) -> tuple[int, int]:
        address = ctypes.cast(self._function, ctypes.c_void_p).value
        assert address is not None
        return address, 77

    def settle(self) -> None:
        if self.has_failed:
            raise DeviceFailed("the GPU has fallen off the bus")
        self.num_settled += 1

    def _enter(self, argument: int | None) -> int:
        assert argument == 77
        self.threads.append(threading.get_ident())
        return self.code


def let_ucx_reach_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the native worker have memory of kind `cuda`, which to UCX is the host's."""
    real = worker_type()

    class Worker:
        def __init__(self, **settings: Any) -> None:  # as the original has them
            self._core = real(**settings)

        @property
        def kinds(self) -> list[str]:
            return [*self._core.kinds, "cuda"]

        def map(self, memory: memoryview, *, kind: str) -> int:
            return self._core.map(memory, kind="host")

        def put(self, route: int, memory: memoryview, remote: int, key: int, *, kind: str) -> int:
            return self._core.put(route, memory, remote, key, kind="host")

        def __getattr__(self, name: str) -> Any:  # the original's
            return getattr(self._core, name)

    monkeypatch.setattr(ucx_native, "worker_type", lambda: Worker)
