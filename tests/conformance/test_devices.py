"""Every device passes the same checks: order, lateness, waiting, memory, and copies between the two."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator

import anyio
import anyio.to_thread
import pytest
import torch

from wbridge.device.base import Device, MemoryKind, Stream
from wbridge.device.copy import Block, build_gather, build_scatter, gather, scatter
from wbridge.device.cpu import CpuDevice
from wbridge.device.mirror import Mirror
from wbridge.device.select import open_device

pytestmark = pytest.mark.anyio

BUSY_CYCLES = 100_000_000
"""Some 50 ms of a GPU's time."""


@pytest.fixture(params=["cpu", "late cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU is visible to torch")
    found: Device = CpuDevice(seed=3) if request.param == "late cpu" else open_device(request.param)
    yield found
    found.close()


def where(device: Device) -> torch.device:
    return torch.device(device.name)


def occupy(device: Device, stream: Stream) -> Callable[[], None]:
    """Keep `stream` busy until the returned function is called, or for a while; nobody waits for it here."""
    if where(device).type == "cuda":
        stream.submit(lambda: torch.cuda._sleep(BUSY_CYCLES))
        return lambda: None
    gate = threading.Event()
    stream.submit(lambda: None if gate.wait(20.0) else pytest.fail("never released"))
    return gate.set


def settle(device: Device) -> None:
    """Wait for what the test itself has launched."""
    if where(device).type == "cuda":
        torch.cuda.synchronize()


async def test_work_runs_in_order_and_an_event_is_done_after_it(device: Device) -> None:
    stream, total = device.open_stream("s"), torch.zeros(4, dtype=torch.int64, device=where(device))
    settle(device)
    for k in range(20):
        stream.submit(lambda k=k: total.mul_(2).add_(k % 3))
    event = stream.record()
    await event.wait()
    assert event.is_done()
    expected = 0
    for k in range(20):
        expected = 2 * expected + k % 3
    assert total.tolist() == [expected] * 4
    event.synchronize()
    await event.wait()


async def test_submitting_waits_for_nothing(device: Device) -> None:
    if isinstance(device, CpuDevice) and device._seed is not None:
        pytest.skip("a seeded stream runs work inside submit, now and then")
    stream = device.open_stream("s")
    release = occupy(device, stream)
    event = stream.record()
    assert not event.is_done()
    release()
    await event.wait()
    assert event.is_done()


async def test_a_stream_waits_for_the_event_of_another(device: Device) -> None:
    first, second = device.open_stream("first"), device.open_stream("second", background=True)
    source, target = (torch.zeros(2**16, device=where(device)) for _ in range(2))
    settle(device)
    if not isinstance(device, CpuDevice):
        occupy(device, first)
    first.submit(lambda: source.fill_(1.0))
    second.wait_event(first.record())
    second.submit(lambda: target.copy_(source))
    await second.record().wait()
    assert bool((target == 1.0).all())


async def test_the_callers_own_work_comes_before_what_waits_for_it(device: Device) -> None:
    stream, source = device.open_stream("s"), torch.zeros(2**16, device=where(device))
    target = torch.zeros_like(source)
    if where(device).type == "cuda":
        torch.cuda._sleep(BUSY_CYCLES)
    source.fill_(1.0)
    stream.wait_event(device.current_stream().record())
    stream.submit(lambda: target.copy_(source))
    await stream.record().wait()
    assert bool((target == 1.0).all())


async def test_the_caller_waits_for_a_stream_in_its_own_order(device: Device) -> None:
    stream, source = device.open_stream("s"), torch.zeros(2**16, device=where(device))
    settle(device)
    if not isinstance(device, CpuDevice):
        occupy(device, stream)
    stream.submit(lambda: source.fill_(1.0))
    device.current_stream().wait_event(stream.record())
    seen = source.clone()
    assert bool((seen == 1.0).all())


async def test_a_stream_of_the_host_keeps_its_order(device: Device) -> None:
    stream, ran = device.open_stream("copies", on_host=True), []
    for k in range(20):
        stream.submit(lambda k=k: ran.append(k))
    await stream.record().wait()
    assert ran == list(range(20))


async def test_a_cancelled_wait_leaves_the_work_running(device: Device) -> None:
    stream, done = device.open_stream("s"), torch.zeros(1, device=where(device))
    settle(device)
    stream.submit(lambda: done.fill_(1.0))
    event = stream.record()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await event.wait()
    await event.wait()
    assert done.item() == 1.0


async def test_many_waiters_on_several_loops_are_woken(device: Device) -> None:
    stream, woken = device.open_stream("s"), []
    release = occupy(device, stream)
    events = [stream.record() for _ in range(3)]

    async def wait(k: int) -> None:
        await events[k % 3].wait()
        woken.append(k)

    async def wait_elsewhere() -> None:
        async with anyio.create_task_group() as tasks:
            for k in range(6):
                tasks.start_soon(wait, k)

    with anyio.fail_after(20.0):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, lambda: anyio.run(wait_elsewhere))
            for k in range(6, 12):
                tasks.start_soon(wait, k)
            await anyio.sleep(0.01)
            release()
    assert sorted(woken) == list(range(12))


async def test_an_event_that_nobody_waits_for_any_more_is_harmless(device: Device) -> None:
    """As when a loop ends in the middle of an update: the next waiter is woken all the same."""
    stream = device.open_stream("s")
    release = occupy(device, stream)
    left = stream.record()

    async def give_up() -> None:
        with anyio.move_on_after(0.001):
            await left.wait()

    await anyio.to_thread.run_sync(lambda: anyio.run(give_up))
    release()
    with anyio.fail_after(20.0):
        await stream.record().wait()


async def test_failed_work_is_told_and_the_stream_goes_on(device: Device) -> None:
    """By the next event, since some of the work may be under way."""
    stream, done = device.open_stream("s"), torch.zeros(1, device=where(device))
    settle(device)

    def fail() -> None:
        raise ValueError("broken copy")

    stream.submit(fail)
    event = stream.record()
    for _ in range(2):
        with pytest.raises(ValueError, match="broken copy"):
            await event.wait()
    stream.submit(lambda: done.fill_(1.0))
    await stream.record().wait()
    assert done.item() == 1.0


async def test_closing_waits_for_what_was_submitted(device: Device) -> None:
    stream, done = device.open_stream("s"), torch.zeros(2**16, device=where(device))
    settle(device)
    if not isinstance(device, CpuDevice):
        occupy(device, stream)
    stream.submit(lambda: done.fill_(1.0))
    stream.close()
    stream.close()
    event_of_another = device.open_stream("t").record()
    device.close()
    device.close()
    assert event_of_another.is_done()
    assert bool((done == 1.0).all())


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("nbytes", [0, 1, 4097, 2**21])
def test_host_memory_is_zeroed_and_one_with_its_view(device: Device, nbytes: int, shared: bool) -> None:
    buffer = device.allocate(nbytes, "pinned", shared=shared)
    assert buffer.nbytes == buffer.view.nbytes == buffer.tensor.numel() == nbytes
    assert buffer.kind == "pinned"
    assert buffer.is_host
    assert not any(buffer.view)
    if nbytes:
        assert (buffer.descriptor is not None) is shared
        buffer.view[-1] = 7
        assert buffer.tensor[-1] == 7


@pytest.mark.parametrize("nbytes", [0, 1, 4097])
def test_device_memory_is_zeroed_and_where_the_device_is(device: Device, nbytes: int) -> None:
    buffer = device.allocate(nbytes, "device")
    tensor = buffer.tensor
    assert isinstance(tensor, torch.Tensor)
    assert (buffer.nbytes, tensor.numel(), buffer.kind) == (nbytes, nbytes, "device")
    assert tensor.device == where(device)
    assert not tensor.any()


async def test_adopted_memory_is_the_owners(device: Device) -> None:
    owner = CpuDevice().allocate(2**20, "pinned", shared=True)
    adopted, stream = device.adopt(owner.view), device.open_stream("s")
    values = torch.arange(2**20, device=where(device)).to(torch.uint8)
    settle(device)
    stream.submit(lambda: adopted.tensor.copy_(values, non_blocking=True))
    await stream.record().wait()
    assert torch.equal(owner.tensor, values.cpu())


async def test_host_memory_can_be_allocated_again_and_again(device: Device) -> None:
    """What was page-locked is let go with the buffer, else the same pages could not be locked again."""
    for k in range(10):
        buffer, stream = device.allocate(2**22, "pinned", shared=True), device.open_stream(f"s{k}")
        ones = torch.ones(2**22, dtype=torch.uint8, device=where(device))
        settle(device)
        stream.submit(lambda b=buffer, t=ones: b.tensor.copy_(t, non_blocking=True))
        await stream.record().wait()
        assert buffer.view[-1] == 1
        stream.close()


def _strided(name: str, slot_dtype: str, offset: int) -> Block:
    """Every second column of a 6 x 8 matrix, packed in the slot."""
    return Block(name, (6, 4), 1, (8, 2), slot_dtype, offset, (4, 1))


@pytest.mark.parametrize("kind", ["pinned", "device"])
@pytest.mark.parametrize(
    ("dtype", "slot_dtype"),
    [
        ("float32", "float32"),
        ("float32", "bfloat16"),
        ("bfloat16", "float32"),
        ("float16", "float32"),
        ("uint8", "uint8"),
        ("float64", "float64"),
    ],
)
async def test_gathered_elements_come_back_where_they_were(
    device: Device, kind: MemoryKind, dtype: str, slot_dtype: str
) -> None:
    """Through a slot and back into other tensors; what no block names is left alone."""
    element = getattr(torch, dtype)
    sources = {
        f"p{k}": torch.arange(48, device=where(device)).add(k).reshape(6, 8).to(element) for k in range(3)
    }
    targets = {name: torch.full_like(tensor, 99) for name, tensor in sources.items()}
    settle(device)
    blocks = [_strided(name, slot_dtype, 4096 * k) for k, name in enumerate(sources)]
    buffer = device.allocate(5 * 4096, kind)
    gathers, applies = device.open_stream("gather"), device.open_stream("apply")
    gathered = gather(gathers, build_gather(blocks, sources), buffer, 4096)
    applies.wait_event(gathered)
    await scatter(applies, build_scatter(blocks, targets), buffer, 4096).wait()
    for name, source in sources.items():
        assert torch.equal(targets[name][:, 1::2], source[:, 1::2]), name
        assert bool((targets[name][:, ::2] == 99).all()), name


async def test_a_slot_is_replicated_over_a_loop_without_stride(device: Device) -> None:
    target = {"p": torch.zeros(3, 4, device=where(device))}
    buffer, stream = device.allocate(4096, "pinned"), device.open_stream("apply")
    struct.pack_into("4f", buffer.view, 0, 0.0, 1.0, 2.0, 3.0)
    settle(device)
    block = Block("p", (3, 4), 0, (4, 1), "float32", 0, (0, 1))
    await scatter(stream, build_scatter([block], target), buffer).wait()
    assert target["p"].tolist() == [[0.0, 1.0, 2.0, 3.0]] * 3


async def test_a_mirror_is_as_the_tensors_were_when_its_stream_came_to_it(device: Device) -> None:
    tensors = {
        "plain": torch.arange(24.0, device=where(device)).reshape(4, 6),
        "transposed": torch.arange(24.0, device=where(device)).reshape(4, 6).t(),
        "scalar": torch.tensor(5.0, device=where(device)),
        "empty": torch.zeros(0, device=where(device)),
    }
    expected = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
    mirror, stream = Mirror(device, tensors, tensors), device.open_stream("snapshot")
    stream.wait_event(device.current_stream().record())
    event = mirror.copy(stream)
    device.current_stream().wait_event(event)
    for tensor in tensors.values():
        tensor.fill_(-1.0)
    await event.wait()
    for name, tensor in expected.items():
        assert torch.equal(mirror.tensors[name], tensor), name
        assert mirror.tensors[name].stride() == tensor.stride() or not tensor.numel()
