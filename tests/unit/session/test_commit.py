"""A version counts when every byte of it is in place, on every worker, whatever the transport."""

from __future__ import annotations

import threading
from pathlib import Path

import anyio.lowlevel
import pytest

from tests.unit.session.job import running, running_sync
from wbridge.device.cpu import CpuDevice, CpuStream
from wbridge.errors import PeerLost, UpdateAborted, WBridgeError

pytestmark = pytest.mark.anyio


class Watched(CpuDevice):
    """A device whose gather stream a test can put work into."""

    gather: CpuStream

    def open_stream(self, name: str, *, background: bool = False, on_host: bool = False) -> CpuStream:
        stream = super().open_stream(name, background=background)
        if name == "gather":
            self.gather = stream
        return stream


async def test_c41_a_version_waits_for_the_bytes_of_every_sender(tmp_path: Path) -> None:
    slow, bytes_may_come = Watched(), threading.Event()
    async with running(tmp_path, "async", engines={"engine-0": 2}, sender_devices={1: slow}) as job:
        await job.update(1)
        share = job.senders[0].counters["put_nbytes"]
        slow.gather.submit(bytes_may_come.wait)
        delivery = (await job.send(2))[0]
        while job.senders[0].counters["put_nbytes"] < 2 * share:  # all that rank 0 has to send
            for receiver in job.receivers:
                assert await receiver.poll_requests() is None
            await anyio.sleep(0.001)
        assert delivery.outcomes == {}
        assert [receiver.version for receiver in job.receivers] == [1, 1]
        assert job.holds(1)

        bytes_may_come.set()
        await job.take()
        assert job.holds(2)
        assert await delivery.applied() == {"engine-0": "applied"}
    slow.close()


async def test_c44_a_send_that_fails_midway_publishes_nothing(tmp_path: Path) -> None:
    broken = Watched()

    def fail() -> None:
        raise RuntimeError("a copy has failed")

    async with running(tmp_path, "async", engines={"engine-0": 2}, sender_devices={1: broken}) as job:
        await job.update(1)
        broken.gather.submit(fail)
        deliveries = await job.send(2)
        with pytest.raises((UpdateAborted, PeerLost), match="trainer rank 1 is lost"):
            await deliveries[0].applied()
        with pytest.raises(WBridgeError, match="a copy has failed"):
            await deliveries[1].applied()
        for receiver in job.receivers:
            assert await receiver.poll_requests() is None
            with receiver.step() as version:
                assert version == 1
        assert job.holds(1)
    broken.close()


@pytest.mark.parametrize("transport", ["loopback", "shared_memory", "ucxx", "auto"])
async def test_c46_every_transport_commits_in_the_same_place(transport: str, tmp_path: Path) -> None:
    async with running(tmp_path, "async", num_trainers=1, transport=transport) as job:
        for version in (1, 2):
            deliveries, updates = await job.update(version)
            assert await deliveries[0].applied() == {"engine-0": "applied", "engine-1": "applied"}
            assert {update.version for update in updates} == {version}
            for receiver in job.receivers:
                assert receiver.version == version
                async with receiver.step() as running_version:
                    assert running_version == version
            assert job.holds(version)


def test_c46_both_kinds_of_adapters_commit_in_the_same_place(tmp_path: Path) -> None:
    with running_sync(tmp_path, "async", num_trainers=1) as job:
        for version in (1, 2):
            job.update(version)
            for receiver in job.receivers:
                assert receiver.version == version
                with receiver.step() as running_version:
                    assert running_version == version
            assert job.holds(version)
