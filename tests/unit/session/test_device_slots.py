"""Slots in memory that only the workers' devices reach, and when they lie in host memory instead."""

from __future__ import annotations

import logging
from contextlib import closing
from pathlib import Path

import anyio
import msgspec
import pytest

import wbridge
from tests.models.far import FAR, FarDevice
from tests.models.networked import Gpu, NetworkedDevice, let_ucx_reach_gpus
from tests.unit.session.job import PATIENCE_S, Job, gather, running
from wbridge.config import Config
from wbridge.device import copy
from wbridge.device.base import HOST, Access, NetworkedGpu, PeerMemory
from wbridge.device.cpu import CpuBuffer, CpuDevice
from wbridge.errors import NativeUnavailable, UpdateAborted, WBridgeError
from wbridge.native.ucx import why_missing
from wbridge.session import worker
from wbridge.transport.select import Transports

pytestmark = pytest.mark.anyio

UNREACHED = Access(memory="")
SHARED = {"transport": "shared_memory"}


@pytest.fixture
def access_of(monkeypatch: pytest.MonkeyPatch) -> dict[str, Access]:
    """What the workers say of themselves, by the beginning of their names; the longest counts."""
    found: dict[str, Access] = {"": FAR}

    def open_transports(
        config: Config, token: str, *, name: str, access: Access, gpu: NetworkedGpu | None
    ) -> Transports:
        assert gpu is None
        start = max((start for start in found if name.startswith(start)), key=len)
        return Transports(config, token, name=name, access=found[start])

    monkeypatch.setattr(worker, "open_transports", open_transports)
    monkeypatch.setattr(copy, "native_missing", lambda: "it copies between addresses of the host")
    return found


@pytest.fixture
def gpu_of(monkeypatch: pytest.MonkeyPatch) -> dict[str, Gpu | None]:
    """The same with GPUs that UCX reaches; each worker is on a host of its own, if none is set."""
    if (why := why_missing()) is not None:
        pytest.skip(why)
    found: dict[str, Gpu | None] = {"": Gpu()}

    def open_transports(config: Config, token: str, *, name: str, **_: object) -> Transports:
        start = max((start for start in found if name.startswith(start)), key=len)
        config = msgspec.structs.replace(config, host=config.host or name)
        return Transports(config, name, name=name, access=UNREACHED, gpu=found[start])

    let_ucx_reach_gpus(monkeypatch)
    monkeypatch.setattr(worker, "open_transports", open_transports)
    monkeypatch.setattr(copy, "native_missing", lambda: "it copies between addresses of the host")
    return found


def are_far(job: Job) -> list[bool]:
    """Of each receiver, whether its slots lie in its device's memory."""
    stagings = [receiver._rollout._engine._context.staging for receiver in job.receivers]
    return [not buffer.is_host for staging in stagings for buffer in staging.buffers]


@pytest.mark.parametrize("mode", ["sync", "sender_overlap"])
async def test_senders_gather_into_the_device_memory_of_the_receiver(
    mode: str, access_of: dict[str, Access], tmp_path: Path
) -> None:
    with closing(FarDevice(seed=5)) as device:
        async with running(tmp_path, mode, devices=(device, device), **SHARED) as job:
            assert are_far(job) == [True] * 3
            for version in (1, 2, 3):
                await job.update(version)
                assert job.holds(version)


async def test_a_withdrawn_slot_on_a_device_is_written_again(
    access_of: dict[str, Access], tmp_path: Path
) -> None:
    with closing(FarDevice()) as device:
        async with running(tmp_path, "sync", devices=(device, device), **SHARED) as job:
            await job.update(1)
            for trainer in job.trainers:
                trainer.set_version(2)
            with anyio.move_on_after(0):
                await gather(*[lambda s=s: s.send_weights(2) for s in job.senders])
            await job.update(3)
            assert are_far(job) == [True] * 3
            assert job.holds(3)


@pytest.mark.parametrize(
    ("who", "access"),
    [
        ("trainer/trainer[1]", Access()),
        ("trainer/trainer[1]", Access("GPU b", (HOST, "GPU b"))),
        ("rollout/", UNREACHED),
    ],
)
async def test_slots_are_in_host_memory_if_one_writer_does_not_reach_the_device(
    who: str, access: Access, access_of: dict[str, Access], tmp_path: Path
) -> None:
    access_of[who] = access
    with closing(FarDevice()) as device:
        async with running(tmp_path, "sync", devices=(device, device), **SHARED) as job:
            assert are_far(job) == [False] * 3
            await job.update(1)
            assert job.holds(1)


@pytest.mark.parametrize("mode", ["sync", "sender_overlap", "receiver_overlap", "async"])
@pytest.mark.parametrize("more", [{"transport": "loopback"}, {**SHARED, "checksum": "on"}, SHARED])
async def test_slots_are_in_host_memory_if_the_host_copies_or_reads_them(
    mode: str, more: dict[str, str], access_of: dict[str, Access], tmp_path: Path
) -> None:
    is_direct = mode in ("sync", "sender_overlap")
    with closing(FarDevice()) as device:
        async with running(tmp_path, mode, devices=(device, device), **more) as job:
            assert are_far(job) == [is_direct and more is SHARED] * 3
            await job.update(1)
            assert job.holds(1)


async def test_slots_move_with_the_mode(access_of: dict[str, Access], tmp_path: Path) -> None:
    with closing(FarDevice()) as device:
        async with running(tmp_path, "sync", devices=(device, device), receiver_config={}, **SHARED) as job:
            await job.update(1)
            for version, mode in enumerate(("async", "sender_overlap"), start=2):
                await gather(*[lambda s=s, m=mode: s.reconfigure(mode=m) for s in job.senders])
                await job.update(version)
                assert are_far(job) == [mode == "sender_overlap"] * 3
                assert job.holds(version)


async def test_a_writer_that_cannot_open_the_slots_says_why_and_keeps_nobody(
    access_of: dict[str, Access], tmp_path: Path
) -> None:
    class Barred(FarDevice):
        def adopt(self, memory: PeerMemory) -> CpuBuffer:
            return CpuDevice().adopt(memory)

    errors: list[WBridgeError] = []

    async def send(sender: wbridge.SenderAdapter) -> None:
        try:
            await sender.send_weights(1)
        except WBridgeError as exc:
            errors.append(exc)

    with closing(FarDevice()) as device, closing(Barred()) as barred:
        devices = {"devices": (device, device), "sender_devices": {1: barred}}
        async with running(tmp_path, "sync", **devices, **SHARED) as job, anyio.create_task_group() as tasks:
            polls = [receiver.poll_requests for receiver in job.receivers]
            tasks.start_soon(gather, *[lambda p=p: p(wait_s=PATIENCE_S) for p in polls])
            await gather(*[lambda s=s: send(s) for s in job.senders])
            tasks.cancel_scope.cancel()
    assert sorted(map(type, errors), key=str) == [NativeUnavailable, UpdateAborted], errors


# Over UCX ------------------------------------------------------------------------------------------------


def gather_on_gpu(job: Job) -> set[bool]:
    """Whether the trainers gather for UCX in their device's memory."""
    contexts = [sender._trainer._epoch.engine._puts._context for sender in job.senders]
    slots = [slots for context in contexts for slots in context.gather_slots.values()]
    return {not slot.buffer.is_host for own in slots for slot in own._slots}


@pytest.mark.parametrize("host", ["", "one"])
@pytest.mark.parametrize("mode", ["sync", "sender_overlap", "receiver_overlap", "async"])
async def test_ucx_puts_from_device_memory_into_device_memory(
    mode: str, host: str, gpu_of: dict[str, Gpu | None], tmp_path: Path
) -> None:
    gpu = gpu_of[""]
    assert gpu is not None
    more = {"transport": "ucxx", "checksum": "off", "host": host, "relays": "off"}
    with closing(NetworkedDevice(seed=5)) as device:
        async with running(tmp_path, mode, devices=(device, device), **more) as job:
            assert are_far(job) == [mode in ("sync", "sender_overlap")] * 3
            assert gather_on_gpu(job) == {mode in ("sync", "receiver_overlap")}
            for version in (1, 2, 3):
                await job.update(version)
                assert job.holds(version)
            assert (gpu.num_settled > 0) is (mode in ("sync", "sender_overlap"))


@pytest.mark.parametrize(
    ("mode", "more", "without", "why"),
    [
        ("sync", {}, None, "set checksum='off'"),
        ("sync", {"checksum": "on", "host": "one"}, None, "set checksum='off'"),
        ("sync", {"checksum": "off"}, "trainer/trainer[1]", "UCX_TLS"),
        ("sync", {"checksum": "off"}, "rollout/", "UCX_TLS"),
        ("async", {"checksum": "off"}, None, "mode='async'"),
    ],
)
async def test_the_reason_is_told_why_slots_that_ucx_writes_are_in_host_memory(
    mode: str,
    more: dict[str, str],
    without: str | None,
    why: str,
    gpu_of: dict[str, Gpu | None],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if without is not None:
        gpu_of[without] = None
    caplog.set_level(logging.INFO, "wbridge")
    more = {"transport": "ucxx", "relays": "off", **more}
    with closing(NetworkedDevice()) as device:
        async with running(tmp_path, mode, devices=(device, device), **more) as job:
            assert are_far(job) == [False] * 3
            await job.update(1)
            assert job.holds(1)
    told = [vars(record) for record in caplog.records if record.message == "slots are open"]
    assert len(told) == 3
    assert all(why in record["why_on_host"] and record["memory"] == ["pinned"] for record in told)
