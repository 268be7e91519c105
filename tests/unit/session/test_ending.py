"""What goes wrong while an adapter ends reaches its caller and the log."""

from __future__ import annotations

import logging
from pathlib import Path

import anyio
import pytest

import wbridge
from tests.unit.session.job import PATIENCE_S, Job, running
from wbridge.device.cpu import CpuDevice
from wbridge.errors import InternalError, UpdateAborted, WBridgeError
from wbridge.session import worker

pytestmark = pytest.mark.anyio


class Stuck(CpuDevice):
    """A device that cannot be closed the first time."""

    is_stuck = True

    def close(self) -> None:
        super().close()
        was_stuck, self.is_stuck = self.is_stuck, False
        if was_stuck:
            raise OSError("the driver has gone")


@pytest.fixture
def stuck_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices that epochs open for themselves are stuck."""
    monkeypatch.setattr(worker.Worker, "open_epoch_device", _open_stuck)


def _open_stuck(self: worker.Worker) -> CpuDevice:
    self._epoch_device = device = Stuck()
    return device


async def end(adapter: wbridge.SenderAdapter | wbridge.ReceiverAdapter) -> None:
    with pytest.raises(InternalError, match="the driver has gone") as raised:
        await adapter.aclose()
    assert isinstance(raised.value.__cause__, OSError)
    await adapter.aclose()  # it has ended all the same


@pytest.mark.usefixtures("stuck_devices")
async def test_close_raises_what_failed_while_it_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path, "async", num_trainers=1, engines={"engine-0": 1}) as job:
        await job.update(1)
        await end(job.receivers[0])
        await end(job.senders[0])
    records = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert {record.__dict__["worker"] for record in records} == {
        str(job.rollouts[0].target.worker),
        str(job.trainers[0].source.worker),
    }
    assert all("the driver has gone" in str(record.exc_info) for record in records)


@pytest.mark.usefixtures("stuck_devices")
async def test_the_next_call_raises_what_failed_when_the_membership_ended_by_itself(tmp_path: Path) -> None:
    async with running(tmp_path, "async", num_trainers=1, engines={"engine-0": 1}) as job:
        await job.update(1)
        await lose_membership(job)
        with pytest.raises(InternalError, match=r"stopping failed.*the driver has gone.*after: .*a bug"):
            await job.receivers[0].poll_requests(wait_s=PATIENCE_S)
        with pytest.raises(InternalError, match=r"stopping failed.*after: .*a bug"):
            await job.senders[0].send_weights(2)
        await end(job.receivers[0])
        await end(job.senders[0])


@pytest.mark.usefixtures("stuck_devices")
async def test_a_send_ends_with_its_epoch_although_that_fails_to_stop(tmp_path: Path) -> None:
    """It has no task of its own that would end with the loop."""
    async with running(tmp_path, "sync", num_trainers=1, engines={"engine-0": 1}) as job:
        await job.update(1)
        trainer = job.senders[0]._trainer
        epoch = trainer._epoch
        assert epoch is not None
        error = UpdateAborted("another epoch begins")

        async def send() -> None:
            with pytest.raises(UpdateAborted, match="another epoch begins"):
                await job.senders[0].send_weights(2)  # which nobody takes

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send)
            while not epoch._unfinished or epoch.announced != 2:
                await anyio.sleep(0.001)
            ending = trainer._worker.loop.submit(lambda: trainer._end_epoch(error)).finished
            with pytest.raises(OSError, match="the driver has gone"):
                await anyio.to_thread.run_sync(ending.result)
            unfinished = set(epoch._unfinished)
            trainer._worker.loop.call(lambda: epoch.end(error))  # or a failing test would not end
            assert not unfinished
        await end(job.receivers[0])


async def lose_membership(job: Job) -> None:
    """Let a task of each adapter fail."""

    async def fail() -> None:
        raise WBridgeError("a bug")

    for role in (job.receivers[0]._rollout, job.senders[0]._trainer):

        async def start(tasks: object = role._tasks) -> None:
            tasks.start_soon(fail)  # type: ignore[attr-defined]  # a task group

        role._worker.loop.submit(start).finished.result(PATIENCE_S)
        assert role._worker._running is not None
        role._worker._running.finished.result(PATIENCE_S)
