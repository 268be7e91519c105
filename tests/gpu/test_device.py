"""What only a GPU can show: memory that processes share, streams of our own, waiting without looking."""

from __future__ import annotations

import functools
import mmap
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import anyio
import pytest
import torch

import wbridge
from tests.gpu.memory_peer import NBYTES
from tests.unit.session.job import Job, running, together, toys
from wbridge.device.base import HOST
from wbridge.device.cuda import CudaDevice, find_access
from wbridge.device.cuda_driver import why_no_rings
from wbridge.device.cuda_memory import GpuMemory, why_not_shared
from wbridge.device.cuda_stream import CudaEvent
from wbridge.device.memory import ExportedMemory
from wbridge.device.sharing import arena_of
from wbridge.device.wakeup import _PATIENCE_S
from wbridge.errors import NativeUnavailable
from wbridge.staging.in_place import InPlaceReceiver

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
PATIENCE_S = 30.0
MS = 2_000_000
"""Cycles of some millisecond."""
ENGINES = {"engine-0": 2, "engine-1": 1}


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    with closing(CudaDevice(0)) as device:
        yield device


@contextmanager
def peer(role: str) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    here.settimeout(PATIENCE_S)
    with here, there:
        command = [sys.executable, "-m", "tests.gpu.memory_peer", role, str(there.fileno())]
        child = subprocess.Popen(command, cwd=ROOT, pass_fds=[there.fileno()])
        there.close()
        with child:
            try:
                yield child, here
            finally:
                child.kill()


def on_stream(device: CudaDevice, work: Callable[[], object]) -> None:
    stream = device.open_stream("test")
    stream.submit(lambda: (work(), None)[1])
    stream.record().synchronize()


# Memory -------------------------------------------------------------------------------------------------


def test_this_machine_offers_all_of_it() -> None:
    """Else most of what follows would be skipped, or show the fallback."""
    assert why_not_shared(0) is None
    assert why_no_rings() is None
    access = find_access("cuda:0")
    assert access.writes[:1] == (HOST,)
    assert access.memory in access.writes


def test_device_memory_is_zeroed_and_has_addresses_that_are_its_own(device: CudaDevice) -> None:
    buffer = device.allocate(NBYTES, "device", shared=True)
    assert (buffer.nbytes, buffer.kind, buffer.is_host) == (NBYTES, "device", False)
    assert buffer.descriptor is not None
    assert not bool(buffer.tensor.any())
    assert buffer.tensor.device == torch.device("cuda:0")
    part = torch.frombuffer(buffer.addresses[100:200], dtype=torch.uint8)
    assert (part.data_ptr(), part.numel()) == (buffer.tensor.data_ptr() + 100, 100)
    with pytest.raises(NativeUnavailable, match="memory of a GPU"):
        _ = buffer.view
    device.allocate(0, "device", shared=True)


def test_memory_can_be_opened_twice_in_the_process_that_has_it(device: CudaDevice) -> None:
    buffer = device.allocate(NBYTES, "device", shared=True)
    descriptor = buffer.descriptor
    assert descriptor is not None
    opened = GpuMemory.open(0, descriptor, NBYTES).tensor()
    assert opened.data_ptr() != buffer.tensor.data_ptr()
    on_stream(device, lambda: opened.fill_(9))
    assert bool((buffer.tensor == 9).all())


def test_memory_is_given_back_with_its_last_user(device: CudaDevice) -> None:
    def free() -> int:
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info(0)[0]

    on_stream(device, lambda: None)
    before = free()
    buffer = device.allocate(2**28, "device", shared=True)
    tensor = buffer.tensor[5:]
    del buffer
    assert before - free() >= 2**28
    del tensor
    assert before - free() < 2**24


def test_torch_gets_memory_where_shared_memory_was_before(device: CudaDevice) -> None:
    for _ in range(3):
        buffers = [device.allocate(20 * 2**20, "device", shared=True) for _ in range(2)]
        opened = [GpuMemory.open(0, buffer.descriptor or -1, buffer.nbytes) for buffer in buffers]
        del buffers, opened
        tensors = [torch.empty(22 * 2**20, dtype=torch.uint8, device="cuda:0") for _ in range(50)]
        del tensors
        torch.cuda.empty_cache()


def test_too_much_memory_is_refused_with_a_remedy(device: CudaDevice) -> None:
    with pytest.raises(wbridge.ConfigError, match="slot_nbytes"):
        device.allocate(2**44, "device", shared=True)


def test_another_process_writes_it(device: CudaDevice) -> None:
    buffer = device.allocate(NBYTES, "device", shared=True)
    assert buffer.descriptor is not None
    with peer("writer") as (_, connection):
        socket.send_fds(connection, [b"d"], [buffer.descriptor])
        assert connection.recv(1) == b"1"
        assert bool((buffer.tensor == 1).all())


def test_a_writer_that_is_killed_while_its_gpu_writes_leaves_the_owner_unharmed(device: CudaDevice) -> None:
    buffer = device.allocate(NBYTES, "device", shared=True)
    assert buffer.descriptor is not None
    with peer("writer") as (child, connection):
        socket.send_fds(connection, [b"d"], [buffer.descriptor])
        assert connection.recv(1) == b"1"
        child.kill()
        child.wait(PATIENCE_S)
    on_stream(device, lambda: buffer.tensor.fill_(3))
    time.sleep(0.3)  # longer than the dead writer's GPU was to be busy before it wrote 2
    assert bool((buffer.tensor == 3).all()), "a dead process has written"


def test_memory_of_an_owner_that_was_killed_is_still_there(device: CudaDevice) -> None:
    with peer("owner") as (child, connection):
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
        opened = device.adopt(ExportedMemory(descriptors[0], NBYTES))
        child.kill()
        child.wait(PATIENCE_S)
    on_stream(device, lambda: opened.tensor.fill_(4))
    assert bool((opened.tensor == 4).all())


def test_host_memory_that_a_peer_shares_is_mapped_and_page_locked(device: CudaDevice) -> None:
    owned, ones = device.allocate(NBYTES, "pinned", shared=True), torch.ones(NBYTES, dtype=torch.uint8).cuda()
    assert owned.descriptor is not None
    adopted = device.adopt(memoryview(mmap.mmap(owned.descriptor, NBYTES)))
    assert adopted.is_host
    assert adopted.tensor.is_pinned()
    torch.cuda.synchronize()
    on_stream(device, lambda: adopted.tensor.copy_(ones, non_blocking=True))
    assert bool((owned.tensor == 1).all())


def test_a_failed_page_lock_is_not_told_again_by_the_next_kernel(device: CudaDevice) -> None:
    buffer = device.allocate(NBYTES, "pinned")
    with pytest.raises(wbridge.ConfigError, match="ALREADY_REGISTERED"):
        device.adopt(buffer.view)
    assert torch.ones(4, device="cuda:0").sum().item() == 4.0
    del buffer
    again = device.allocate(NBYTES, "pinned")
    assert again.tensor.is_pinned()


def test_the_device_reaches_page_locked_memory(device: CudaDevice) -> None:
    buffer = device.allocate(NBYTES, "pinned")
    there = buffer.device_tensor
    assert there.is_cuda
    assert there.data_ptr() == buffer.tensor.data_ptr()
    on_stream(device, lambda: there.fill_(6))
    assert buffer.view[0] == buffer.view[-1] == 6
    assert device.allocate(0, "pinned").device_tensor.is_cuda


# Streams and waiting ------------------------------------------------------------------------------------


def test_streams_are_our_own_and_used_again() -> None:
    handles = []
    for _ in range(3):
        with closing(CudaDevice(0)) as device:
            streams = [
                device.open_stream("a"),
                device.open_stream("b"),
                device.open_stream("c", background=True),
            ]
            handles.append({stream.handle.cuda_stream for stream in streams})
    of_torch = {torch.cuda.Stream(priority=p).cuda_stream for p in (0, -1) for _ in range(64)}
    assert len(handles[0]) == 3
    assert handles[0] == handles[1] == handles[2]
    assert not handles[0] & of_torch


def test_closed_streams_are_used_again(device: CudaDevice) -> None:
    handles = set()
    for _ in range(5):
        stream = device.open_stream("digest")
        handles.add(stream.handle.cuda_stream)
        stream.close()
    assert len(handles) == 1


def test_a_stream_of_torch_is_wrapped(device: CudaDevice) -> None:
    own = torch.cuda.Stream(0)
    assert device.wrap_stream(own).handle is own
    assert not device.wrap_stream(own).is_capturing
    seen = []
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.ones(4, device="cuda:0")
        seen.append(device.current_stream().is_capturing)
    assert seen == [True]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_on_the_second_gpu_takes_nothing_of_the_first() -> None:
    """In a process of its own, whose threads all begin with the first GPU."""
    command = [sys.executable, "-m", "tests.gpu.second"]
    done = subprocess.run(command, cwd=ROOT, timeout=PATIENCE_S, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "only the second"), done.stderr


@pytest.mark.anyio
async def test_waiting_does_not_look_again_and_again(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_looks = 0
    is_done = CudaEvent.is_done

    def look(event: CudaEvent) -> bool:
        nonlocal num_looks
        num_looks += 1
        return is_done(event)

    stream = device.open_stream("s")
    stream.submit(lambda: torch.cuda._sleep(100 * MS))
    event = stream.record()
    monkeypatch.setattr(CudaEvent, "is_done", look)
    begin_s = time.perf_counter()
    await event.wait()
    assert num_looks <= 6 + (time.perf_counter() - begin_s) / _PATIENCE_S
    assert event.is_done()


@pytest.mark.anyio
async def test_an_early_event_does_not_wait_behind_a_late_one_of_another_stream(device: CudaDevice) -> None:
    late, early = device.open_stream("late"), device.open_stream("early")
    late.submit(lambda: torch.cuda._sleep(500 * MS))
    late_event, early_event, ended = late.record(), early.record(), list[str]()

    async def wait(name: str, event: CudaEvent) -> None:
        await event.wait()
        ended.append(name)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait, "late", late_event)
        await anyio.sleep(0.01)
        early.submit(lambda: torch.cuda._sleep(5 * MS))
        tasks.start_soon(wait, "early", early.record())
    assert early_event.is_done()
    assert ended == ["early", "late"]


@pytest.mark.anyio
async def test_the_applications_stream_is_awaited_without_work_in_it(device: CudaDevice) -> None:
    """What comes after the event does not wait for the host function."""
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50 * MS)
        event = device.current_stream().record()
        await event.wait()
        own = torch.cuda.current_stream().cuda_stream
    assert [stream.cuda_stream for stream in device._rings._streams.values()] != [own]
    assert list(device._rings._streams) == [own]
    assert event.is_done()


def test_waiting_disturbs_no_graph_that_another_thread_captures(device: CudaDevice) -> None:
    """As engines do when they start, while a version may be on its way."""
    total, graph = torch.zeros(4, device="cuda:0"), torch.cuda.CUDAGraph()

    async def wait() -> None:
        stream = device.open_stream("s")
        stream.submit(lambda: torch.cuda._sleep(20 * MS))
        await stream.record().wait()
        device.allocate(NBYTES, "device", shared=True)
        device.allocate(NBYTES, "pinned", shared=True)

    together(lambda: anyio.run(wait))  # whatever is loaded at first use
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        total.add_(1)
        together(lambda: anyio.run(wait))
        total.mul_(2)
    graph.replay()
    assert total.tolist() == [2.0] * 4


@pytest.mark.anyio
async def test_a_cancelled_wait_and_a_closed_device_leave_no_ring_behind() -> None:
    with closing(CudaDevice(0)) as device:
        stream = device.open_stream("s")
        stream.submit(lambda: torch.cuda._sleep(100 * MS))
        with anyio.move_on_after(0.001):
            await stream.record().wait()
        await anyio.to_thread.run_sync(device.close)
        assert not device._rings._bells


@pytest.mark.anyio
async def test_without_the_extension_the_loop_looks_again_and_again(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wbridge.device.cuda_stream.why_no_rings", lambda: "the extension was not built")
    stream = device.open_stream("s")
    stream.submit(lambda: torch.cuda._sleep(20 * MS))
    await stream.record().wait()
    assert not device._rings._bells


# Sessions -----------------------------------------------------------------------------------------------


def stagings(job: Job) -> list[object]:
    return [receiver._rollout._engine._context.staging for receiver in job.receivers]


async def three_versions(job: Job, check: Callable[[], Awaitable[None]]) -> None:
    await check()
    for version in (1, 2, 3):
        await job.update(version)
        assert job.holds(version)


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["sync", "sender_overlap"])
@pytest.mark.parametrize("transport", ["shared_memory", "loopback"])
async def test_slots_lie_on_the_gpu_where_gpus_write_them(mode: str, transport: str, tmp_path: Path) -> None:
    jobs = toys(2, ENGINES, trainer_device="cuda:0", rollout_device="cuda:0")
    on_gpu = transport == "shared_memory"

    async def check() -> None:
        assert [buffer.is_host for staging in stagings(job) for buffer in staging.buffers] == [not on_gpu] * 3

    async with running(tmp_path, mode, engines=ENGINES, toys_of=jobs, transport=transport) as job:
        await three_versions(job, check)


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["sync", "sender_overlap"])
async def test_parameters_on_the_gpu_are_written_in_place(mode: str, tmp_path: Path) -> None:
    jobs = toys(2, ENGINES, trainer_device="cuda:0", rollout_device="cuda:0")
    for rollout in jobs[1]:
        wbridge.share_memory(rollout.parameters.values())
    where = [tensor.data_ptr() for rollout in jobs[1] for tensor in rollout.parameters.values()]

    async def check() -> None:
        assert [type(staging) for staging in stagings(job)] == [InPlaceReceiver] * 3

    async with running(tmp_path, mode, engines=ENGINES, toys_of=jobs, transport="shared_memory") as job:
        await three_versions(job, check)
    assert where == [tensor.data_ptr() for rollout in jobs[1] for tensor in rollout.parameters.values()]


def test_sharing_keeps_objects_views_and_values() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).to("cuda:0")
    tensor = torch.arange(12.0, device="cuda:0").reshape(3, 4)
    view = tensor[1:, ::2]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    weight = model[0].weight
    wbridge.share_memory(model)
    wbridge.share_memory([tensor, view])
    assert model[0].weight is weight
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    view.fill_(-1.0)
    assert torch.equal(tensor[1:, ::2].cpu(), torch.full((2, 2), -1.0)), "of one storage still"
    model(torch.ones(2, 3, device="cuda:0")).sum().backward()
    arena = arena_of([tensor])
    assert arena is not None
    assert not arena.is_host
    assert arena_of([tensor, weight]) is None
    with pytest.raises(wbridge.ConfigError, match="cpu and cuda:0"):
        wbridge.share_memory([tensor, torch.ones(2)])


def test_memory_of_shared_parameters_ends_with_the_last_of_them() -> None:
    tensors = [torch.ones(2**24, device="cuda:0") for _ in range(4)]
    wbridge.share_memory(tensors)
    torch.cuda.empty_cache()
    held = functools.partial(torch.cuda.mem_get_info, 0)
    before = held()[0]
    del tensors[1:]
    assert held()[0] - before < 2**20, "one tensor keeps the arena"
    tensors.clear()
    assert held()[0] - before >= 4 * 2**26 - 2**22
