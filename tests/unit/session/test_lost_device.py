"""A GPU fails in the middle of a job: whoever calls hears of it, nobody waits, and adapters close."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from tests.unit.session.job import PATIENCE_S, running
from wbridge.device.base import Event
from wbridge.device.cpu import CpuDevice, CpuStream
from wbridge.errors import DeviceFailed, UpdateAborted

pytestmark = pytest.mark.anyio


class LostEvent:
    """What a GPU says of an event after it has failed."""

    def is_done(self) -> bool:
        raise DeviceFailed("cuda:0: CUDA error; start this process again")

    async def wait(self) -> None:
        raise DeviceFailed("cuda:0: CUDA error; start this process again")

    def synchronize(self) -> None:
        raise DeviceFailed("cuda:0: CUDA error; start this process again")


class LosingStream(CpuStream):
    """Its thread copies nothing in the caller's stead, so that all copies have events."""

    has_failed = False
    is_idle = False  # type: ignore[assignment]  # a property there

    def record(self) -> Event:  # type: ignore[override]  # this is what is different
        return LostEvent() if self.has_failed else super().record()


class LosingDevice(CpuDevice):
    def __init__(self) -> None:
        super().__init__()
        self._opened: list[LosingStream] = []

    def open_stream(self, name: str, *, background: bool = False, on_host: bool = False) -> CpuStream:
        self._opened.append(LosingStream(name, None, background=background))
        self._opened[-1].start()
        return self._opened[-1]

    def fail(self) -> None:
        for stream in self._opened:
            stream.has_failed = True

    def close(self) -> None:
        for stream in self._opened:
            stream.close()
            stream.join()


ONE = {"num_trainers": 1, "engines": {"engine-0": 1}}


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_a_send_tells_that_the_trainers_gpu_has_failed(mode: str, tmp_path: Path) -> None:
    device = LosingDevice()
    async with running(tmp_path, mode, devices=(device, None), coordinator_timeout_s=0.5, **ONE) as job:
        await job.update(1)
        device.fail()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(job.receivers[0].poll_requests, PATIENCE_S)
            with pytest.raises(DeviceFailed, match="start this process again"):
                await job.senders[0].send_weights(2)
            tasks.cancel_scope.cancel()
    device.close()


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_an_engine_whose_gpu_has_failed_is_tainted(mode: str, tmp_path: Path) -> None:
    device = LosingDevice()
    async with running(tmp_path, mode, devices=(None, device), **ONE) as job:
        await job.update(1)
        device.fail()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(job.send, 2)
            with pytest.raises(UpdateAborted, match="failed midway"):
                await job.receivers[0].poll_requests(wait_s=PATIENCE_S)
            assert job.receivers[0].version is None
            tasks.cancel_scope.cancel()
    device.close()
