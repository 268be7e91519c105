"""How adapters end: at any moment, in bounded time, and leaving nothing behind."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

import wbridge
import wbridge.sync
from tests.models.toy import Rollout, Trainer
from tests.unit.session.job import (
    MODES,
    PATIENCE_S,
    gather,
    rendezvous,
    running,
    running_sync,
    settings,
    together,
    toys,
)
from wbridge.device.cpu import CpuDevice
from wbridge.errors import EndpointClosed, PeerLost, UpdateAborted, WBridgeError

pytestmark = pytest.mark.anyio
ONE = {"engine-0": 1}


def descriptors() -> set[str]:
    """What this process has open, by target: sockets, pipes, files."""
    names = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            names.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue  # the listing itself
    return names


@pytest.mark.parametrize("mode", MODES)
async def test_nothing_is_left_after_close(mode: str, tmp_path: Path) -> None:
    await anyio.to_thread.run_sync(lambda: None)  # the pool of this loop itself
    threads, num_tasks, before = set(threading.enumerate()), len(anyio.get_running_tasks()), descriptors()
    async with running(tmp_path, mode) as job:
        await job.update(1)
    gc.collect()
    left = [thread.name for thread in set(threading.enumerate()) - threads]
    assert not [name for name in left if name.startswith("wbridge")]
    assert len(anyio.get_running_tasks()) == num_tasks
    assert descriptors() - before == set()
    assert not (tmp_path / "rendezvous").exists()


async def test_close_is_idempotent_and_ends_everything_else(tmp_path: Path) -> None:
    async with running(tmp_path, "async", num_trainers=1, engines=ONE) as job:
        await job.update(1)
        sender, receiver = job.senders[0], job.receivers[0]
        await gather(receiver.aclose, receiver.aclose)
        await receiver.aclose()
        await sender.aclose()
        await sender.aclose()
        with pytest.raises(EndpointClosed):
            await sender.send_weights(2)
        with pytest.raises(EndpointClosed):
            await receiver.poll_requests(wait_s=1.0)
        with pytest.raises(EndpointClosed):
            await sender.connect()
        assert receiver.version == 1
        assert job.holds(1)


async def test_an_adapter_that_never_connected_closes(tmp_path: Path) -> None:
    values = settings("sync", 1)
    sender = wbridge.SenderAdapter(Trainer().source, rendezvous=rendezvous(tmp_path), config=values)
    async with sender:
        with pytest.raises(WBridgeError):
            await sender.send_weights(1)
    with wbridge.sync.ReceiverAdapter(Rollout().target, rendezvous=rendezvous(tmp_path), config=values):
        pass


async def test_a_fork_leaves_the_device_to_its_parent(tmp_path: Path) -> None:
    """A child can use no GPU of its parent, not even to end what it has there."""

    class ParentsDevice(CpuDevice):
        def close(self) -> None:
            pytest.fail("used in the child")

    trainers, _ = toys(1, ONE)
    sender = wbridge.SenderAdapter(
        trainers[0].source, rendezvous=rendezvous(tmp_path), config=settings("sync", 1)
    )
    worker = sender._trainer._worker
    worker._caller_device, worker.loop.is_forked = ParentsDevice(), True
    await sender.aclose()


@pytest.mark.parametrize("mode", MODES)
async def test_a_receiver_closes_with_an_update_in_flight(mode: str, tmp_path: Path) -> None:
    """The trainer goes on with the other engine, and hears that this one is lost."""
    engines = {"engine-0": 1, "engine-1": 1}
    async with running(tmp_path, mode, engines=engines, relay_patience_s=0.01) as job:
        await job.update(1)

        async def close() -> None:
            await job.receivers[1].aclose()

        async def send() -> None:
            deliveries = await job.send(2)
            outcomes = await deliveries[0].applied()
            assert outcomes["engine-1"] == "lost"

        await gather(send, close, lambda: job.take(0))
        assert job.rollouts[0].holds(2)


@pytest.mark.parametrize("mode", ["sync", "receiver_overlap"])
async def test_a_sender_closes_with_a_send_in_flight(mode: str, tmp_path: Path) -> None:
    """The engines have not come; the send raises, and they keep serving what they have."""
    async with running(tmp_path, mode, engines=ONE) as job:
        await job.update(1)

        async def send(index: int) -> None:
            with pytest.raises((EndpointClosed, UpdateAborted, PeerLost)):
                await job.senders[index].send_weights(2)

        async def close() -> None:
            await anyio.lowlevel.checkpoint()
            await job.senders[1].aclose()

        begun_s = time.monotonic()
        await gather(lambda: send(0), lambda: send(1), close)
        assert time.monotonic() - begun_s < 10.0  # close_timeout_s
        assert await job.receivers[0].poll_requests() is None
        assert job.receivers[0].version == 1
        assert job.holds(1)


async def test_a_parked_poll_ends_when_its_adapter_closes(tmp_path: Path) -> None:
    async with running(tmp_path, "async", num_trainers=1, engines=ONE) as job:

        async def wait() -> None:
            with pytest.raises((EndpointClosed, PeerLost), match="closed"):
                await job.receivers[0].poll_requests(wait_s=PATIENCE_S)

        async def close() -> None:
            for _ in range(10):
                await anyio.lowlevel.checkpoint()
            await job.receivers[0].aclose()

        await gather(wait, close)


async def test_engines_keep_serving_when_all_trainers_have_left(tmp_path: Path) -> None:
    async with running(tmp_path, "async", engines={"engine-0": 2}) as job:
        await job.update(1)
        await gather(*[sender.aclose for sender in job.senders])
        for _ in range(5):
            for receiver in job.receivers:
                assert await receiver.poll_requests() is None
                with receiver.step() as version:
                    assert version == 1
        assert await job.receivers[0].poll_requests(wait_s=0.02) is None
        assert job.holds(1)


async def test_the_rest_of_an_engine_hears_of_a_worker_that_left(tmp_path: Path) -> None:
    async with running(tmp_path, "async", engines={"engine-0": 2}) as job:
        await job.update(1)
        await job.receivers[1].aclose()
        with pytest.raises(PeerLost, match=r"worker 1 is lost.*connect again"):
            await job.receivers[0].poll_requests(wait_s=PATIENCE_S)
        assert job.receivers[0].version == 1


def test_a_blocking_job_closes_in_any_order(tmp_path: Path) -> None:
    with running_sync(tmp_path, "async") as job:
        job.update(1)
        begun_s = time.monotonic()
        together(*[adapter.close for adapter in (*job.receivers, *job.senders)])
        assert time.monotonic() - begun_s < 10.0  # close_timeout_s
        assert job.holds(1)


async def test_c63_many_coordinators_start_at_once_without_a_port_in_common(tmp_path: Path) -> None:
    num_jobs = 10
    values = settings("sync", 1, connect_timeout_s=0.3)
    adapters = []
    for index in range(num_jobs):
        (tmp_path / str(index)).mkdir()
        url = rendezvous(tmp_path / str(index))
        adapters.append(wbridge.SenderAdapter(Trainer().source, rendezvous=url, config=values))

    async def connect(adapter: wbridge.SenderAdapter) -> str:
        with pytest.raises(wbridge.BarrierTimeout) as caught:  # no engine comes
            await adapter.connect()
        return ",".join(caught.value.missing)

    try:
        missing = await gather(*[lambda a=a: connect(a) for a in adapters])
    finally:
        await gather(*[adapter.aclose for adapter in adapters])
    assert missing == ["1 of 1 engines (nobody has connected)"] * num_jobs
