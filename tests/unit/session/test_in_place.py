"""Writers that write the parameters themselves, where these lie in shared memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

import wbridge
from tests.unit.session.job import PATIENCE_S, Job, running, toys
from wbridge.device.cpu import CpuDevice
from wbridge.errors import UpdateAborted
from wbridge.native.ucx import why_missing
from wbridge.staging.in_place import InPlaceReceiver
from wbridge.transport.exposure_table import ExposureTable
from wbridge.transport.shared_memory import SharedMemoryTransport
from wbridge.transport.unix_endpoint import SharedMemoryEndpoint
from wbridge.transport.unix_frames import decode_slot

pytestmark = pytest.mark.anyio
ENGINES = {"engine-0": 2, "engine-1": 1}
SHARED = {"transport": "shared_memory"}


def stagings(job: Job) -> list[type]:
    return [type(receiver._rollout._engine._context.staging) for receiver in job.receivers]


@pytest.mark.parametrize("mode", ["sync", "sender_overlap"])
@pytest.mark.parametrize("trainer_dtype", [torch.float32, torch.bfloat16, torch.float64])
async def test_versions_are_written_into_shared_parameters(
    mode: str, trainer_dtype: torch.dtype, tmp_path: Path
) -> None:
    jobs = toys(2, ENGINES, trainer_dtype=trainer_dtype, rollout_dtype=torch.bfloat16)
    for rollout in jobs[1]:
        wbridge.share_memory(rollout.parameters.values())
    addresses = [t.data_ptr() for rollout in jobs[1] for t in rollout.parameters.values()]
    async with running(tmp_path, mode, engines=ENGINES, toys_of=jobs, **SHARED) as job:
        assert stagings(job) == [InPlaceReceiver] * 3
        for version in (1, 2, 3):
            await job.update(version)
            assert job.holds(version)
    assert addresses == [t.data_ptr() for rollout in jobs[1] for t in rollout.parameters.values()]


@pytest.mark.parametrize("mode", ["sync", "sender_overlap"])
@pytest.mark.parametrize("trainer_dtype", [torch.float32, torch.bfloat16])
async def test_ucx_writes_runs_into_shared_parameters(
    mode: str, trainer_dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Straight from the weights, or from a slot where these are cast first."""
    if (why := why_missing()) is not None:
        pytest.skip(why)
    monkeypatch.setattr("wbridge.staging.runs.MIN_NBYTES", 0)
    engines = {"engine-0": 1}
    jobs = toys(2, engines, trainer_dtype=trainer_dtype, rollout_dtype=torch.bfloat16)
    wbridge.share_memory(jobs[1][0].parameters.values())
    async with running(tmp_path, mode, engines=engines, toys_of=jobs, transport="ucxx") as job:
        assert stagings(job) == [InPlaceReceiver]
        for version in (1, 2, 3):
            await job.update(version)
            assert job.holds(version)
        counters = job.senders[0].counters
        assert counters["one_sided_nbytes"] == counters["put_nbytes"] > 0


async def test_ucx_leaves_short_runs_to_slots(tmp_path: Path) -> None:
    if (why := why_missing()) is not None:
        pytest.skip(why)
    engines = {"engine-0": 1}
    jobs = toys(1, engines)
    wbridge.share_memory(jobs[1][0].parameters.values())
    async with running(tmp_path, "sync", engines=engines, toys_of=jobs, transport="ucxx") as job:
        assert InPlaceReceiver not in stagings(job)
        await job.update(1)
        assert job.holds(1)


@pytest.mark.parametrize("reason", ["pinned", "not all shared", "checksums", "short"])
async def test_otherwise_bytes_pass_through_slots(reason: str, tmp_path: Path) -> None:
    jobs = toys(2, ENGINES)
    for rollout in jobs[1]:
        shared = dict(rollout.parameters)
        if reason == "not all shared":
            del shared["norm"]
        wbridge.share_memory(shared.values())
    mode = "async" if reason == "pinned" else "sync"
    settings = SHARED | {"checksums": {"checksum": "on"}, "short": {"slot_nbytes": 2**20}}.get(reason, {})
    async with running(tmp_path, mode, engines=ENGINES, toys_of=jobs, **settings) as job:
        assert InPlaceReceiver not in stagings(job)
        await job.update(1)
        assert job.holds(1)


async def until(is_so: Callable[[], bool]) -> None:
    """Adapters have loops of their own: look again until it is so."""
    while True:
        if is_so():
            return
        await anyio.sleep(0.001)


async def test_an_abort_in_the_middle_taints_until_the_writer_has_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows how much was written, so the engine has no version until a whole one has come."""
    jobs = toys(1, {"engine-0": 1})
    wbridge.share_memory(jobs[1][0].parameters.values())
    async with running(tmp_path, "sync", engines={"engine-0": 1}, toys_of=jobs, **SHARED) as job:
        await job.update(1)
        fill, reached, go_on = SharedMemoryEndpoint.fill, threading.Event(), threading.Event()

        async def hang(self: SharedMemoryEndpoint, remote: Any, write: Any) -> None:
            async def write_and_hang(window: Any) -> bytes:
                notify = await write(window)
                reached.set()
                with anyio.CancelScope(shield=True):
                    await until(go_on.is_set)
                return notify

            await fill(self, remote, write_and_hang)

        monkeypatch.setattr(SharedMemoryEndpoint, "fill", hang)

        async def poll() -> None:
            with pytest.raises(UpdateAborted, match="failed midway"):
                await job.receivers[0].poll_requests(wait_s=PATIENCE_S)

        async with anyio.create_task_group() as tasks, anyio.create_task_group() as sending:
            tasks.start_soon(poll)
            sending.start_soon(job.send, 2)
            await until(reached.is_set)
            sending.cancel_scope.cancel()  # which aborts the version, and stays until nothing is read
            try:
                with anyio.fail_after(PATIENCE_S, shield=True):
                    await until(lambda: job.receivers[0].version is None)
                with pytest.raises(UpdateAborted, match="tainted"), job.receivers[0].step():
                    pass
                assert "quarantined" in job.receivers[0]._rollout._engine._ring.states
            finally:
                go_on.set()
        monkeypatch.setattr(SharedMemoryEndpoint, "fill", fill)
        await job.update(3)
        assert job.holds(3)
        assert job.receivers[0].version == 3


async def test_a_writer_that_is_stopped_in_the_middle_holds_up_the_next_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would write an old version over the newest one when it goes on."""
    expose, stopped = SharedMemoryTransport.expose, list[ExposureTable]()

    def expose_to_one_that_stops(self: SharedMemoryTransport, memory: memoryview, peer: str) -> Any:
        remote = expose(self, memory, peer)
        if not stopped:
            table, entry = ExposureTable(self._memory), decode_slot(remote.token, peer).entry
            assert table.try_lock(entry)  # as a process does that has begun to write
            stopped.append(table)
        return remote

    jobs = toys(1, {"engine-0": 1})
    wbridge.share_memory(jobs[1][0].parameters.values())
    config = {"close_timeout_s": 0.5, "connect_timeout_s": PATIENCE_S, **SHARED}
    options = {"engines": {"engine-0": 1}, "toys_of": jobs, "receiver_config": config}
    async with running(tmp_path, "sync", **options, **SHARED) as job:
        await job.update(1)
        monkeypatch.setattr(SharedMemoryTransport, "expose", expose_to_one_that_stops)

        async def poll() -> None:
            with pytest.raises(UpdateAborted, match="failed midway"):
                await job.receivers[0].poll_requests(wait_s=PATIENCE_S)

        async with anyio.create_task_group() as tasks, anyio.create_task_group() as sending:
            tasks.start_soon(poll)
            sending.start_soon(job.send, 2)
            await until(lambda: bool(stopped))
            sending.cancel_scope.cancel()
        late_writers = job.receivers[0]._rollout._late_writers
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(job.senders[0].reconfigure, mode="sender_overlap"))
            await until(lambda: bool(late_writers._slots))
            await anyio.wait_all_tasks_blocked()
            assert job.receivers[0]._rollout._engine is None
            stopped[0].close()
        assert not late_writers._slots
        await job.update(3)
        assert job.holds(3)
        transport = job.receivers[0]._rollout._worker.transports._shared_memory
        assert not transport._exposed


async def test_what_still_reads_the_weights_is_waited_for_before_they_are_written(tmp_path: Path) -> None:
    """On a stream that does nothing until somebody waits for it."""
    device, seen = CpuDevice(seed=5, max_held=10_000), list[torch.Tensor]()
    stream = device.open_stream("forward")
    jobs = toys(1, {"engine-0": 1})
    weights = jobs[1][0].parameters
    wbridge.share_memory(weights.values())
    async with running(tmp_path, "sync", engines={"engine-0": 1}, toys_of=jobs, **SHARED) as job:
        await job.update(1)
        first = weights["norm"].clone()
        stream.submit(lambda: seen.append(weights["norm"].clone()))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(job.send, 2)
            assert await job.receivers[0].poll_requests(wait_s=PATIENCE_S, stream=stream)
        await stream.record().wait()
        assert torch.equal(seen[0], first)
        assert job.holds(2)
    device.close()


async def test_closing_a_receiver_waits_for_who_writes_its_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be loaded anew, or freed, as soon as the adapter is closed."""
    jobs = toys(1, {"engine-0": 1})
    wbridge.share_memory(jobs[1][0].parameters.values())
    async with running(tmp_path, "sync", engines={"engine-0": 1}, toys_of=jobs, **SHARED) as job:
        await job.update(1)
        fill, withdraw = SharedMemoryEndpoint.fill, SharedMemoryTransport.withdraw
        reached, go_on, taken_back = threading.Event(), threading.Event(), list[bool]()

        async def fill_slowly(self: SharedMemoryEndpoint, remote: Any, write: Any) -> None:
            async def write_slowly(window: Any) -> bytes:
                reached.set()
                with anyio.CancelScope(shield=True):
                    await until(go_on.is_set)
                return await write(window)

            await fill(self, remote, write_slowly)

        async def watch(self: SharedMemoryTransport, remote: Any) -> bool:
            go_on.set()
            taken_back.append(await withdraw(self, remote))
            return taken_back[-1]

        monkeypatch.setattr(SharedMemoryEndpoint, "fill", fill_slowly)
        monkeypatch.setattr(SharedMemoryTransport, "withdraw", watch)

        async def poll() -> None:
            with pytest.raises(wbridge.WBridgeError):
                await job.receivers[0].poll_requests(wait_s=PATIENCE_S)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(poll)
            tasks.start_soon(job.send, 2)
            await until(reached.is_set)
            await job.receivers[0].aclose()
            go_on.set()
        with pytest.raises(UpdateAborted, match="tainted"), job.receivers[0].step():
            pass
        assert taken_back
        assert all(taken_back)


async def test_sharing_keeps_objects_views_and_values() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    model.tied = model[0].weight
    tensor = torch.arange(12.0).reshape(3, 4)
    view = tensor[1:, ::2]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    weight = model[0].weight
    wbridge.share_memory(model)
    wbridge.share_memory([tensor, view, torch.empty(0)])
    assert model[0].weight is weight is model.tied
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    view.fill_(-1.0)
    assert torch.equal(tensor[1:, ::2], torch.full((2, 2), -1.0)), "views of one storage stay views of one"
    with pytest.raises(wbridge.ConfigError, match="meta"):
        wbridge.share_memory([torch.empty(3, device="meta")])
