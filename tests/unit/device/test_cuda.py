"""What the CUDA device does around the driver, with fakes where it is called."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch

from wbridge.device import cuda, cuda_stream
from wbridge.device.cuda import CudaDevice
from wbridge.device.cuda_driver import DriverError
from wbridge.device.cuda_stream import CudaEvent, CudaStream, Rings
from wbridge.errors import ConfigError, DeviceFailed, EndpointClosed, NativeUnavailable


class Event:
    """Done after so many looks."""

    handle = None

    def __init__(self, num_looks: int) -> None:
        self.num_looks = num_looks

    def is_done(self) -> bool:
        self.num_looks -= 1
        return self.num_looks < 0


@pytest.fixture
def rung(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The descriptors that were written."""
    written: list[int] = []

    def ring_behind(index: int, stream: int, descriptor: int) -> None:
        written.append(descriptor)
        os.eventfd_write(descriptor, 1)

    stream = SimpleNamespace(cuda_stream=1, wait_event=lambda _: None)
    monkeypatch.setattr(cuda_stream, "why_no_rings", lambda: None)
    monkeypatch.setattr(cuda_stream, "take_stream", lambda *_: stream)
    monkeypatch.setattr(cuda_stream, "finish", lambda *_: None)
    monkeypatch.setattr(cuda_stream, "ring_behind", ring_behind)
    return written


async def wait(rings: Rings, event: Any) -> None:  # the fake of a CudaEvent
    with anyio.fail_after(10.0):
        await rings.wait(event, 7)


@pytest.mark.anyio
async def test_a_wait_rings_once(rung: list[int]) -> None:
    rings, event = Rings(0), Event(1)
    await wait(rings, event)
    assert len(rung) == 1
    rings.close()


@pytest.mark.anyio
async def test_who_cannot_be_told_looks_until_it_is_over(
    rung: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the slot would count as unused while the GPU writes it."""

    def take_stream(index: int, priority: int) -> object:
        raise DriverError("cuStreamCreateWithPriority failed with CUDA_ERROR_OUT_OF_MEMORY")

    monkeypatch.setattr(cuda_stream, "take_stream", take_stream)
    rings, event = Rings(0), Event(5)
    await wait(rings, event)
    assert event.num_looks == -1
    assert not rung
    rings.close()


@pytest.mark.anyio
async def test_nothing_is_rung_once_closed(rung: list[int]) -> None:
    rings, event = Rings(0), Event(5)
    await wait(rings, Event(1))
    await anyio.to_thread.run_sync(rings.close)
    await wait(rings, event)
    assert event.num_looks == -1
    assert len(rung) == 1


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which GPU and stream were made current and were left, in order."""
    found: list[str] = []

    def context(kind: str) -> Callable[[object], Any]:
        @contextmanager
        def enter(what: object) -> Iterator[None]:
            found.append(f"{kind} {what}")
            yield
            found.append(f"not {kind} {what}")

        return enter

    monkeypatch.setattr(torch.cuda, "device", context("GPU"))
    monkeypatch.setattr(torch.cuda, "stream", context("stream"))
    return found


class Handle(str):
    """A stream of torch's on the second GPU, without a GPU."""

    device = 1
    cuda_stream = 7


@pytest.mark.anyio
async def test_work_that_fails_midway_is_told_when_what_it_launched_is_over(
    rung: list[int], entered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its slot would count as unused while the GPU writes it."""
    launched = Event(3)

    def fail() -> None:
        raise RuntimeError("no memory for the second half")

    monkeypatch.setattr(cuda_stream, "record", lambda _: SimpleNamespace(query=launched.is_done))
    stream = CudaStream(Handle("s"), Rings(0))  # type: ignore[arg-type]  # a stream without a GPU
    stream.submit(fail)
    with pytest.raises(RuntimeError, match="second half"):
        await stream.record().wait()
    assert launched.num_looks < 0
    await stream.record().wait()


def test_threads_of_ours_leave_the_first_gpu_alone(entered: list[str]) -> None:
    """torch selects the GPU of the stream before, the first one in a new thread, when a stream of another GPU
    is left: CUDA then takes hundreds of megabytes there. And it looks at events wherever the thread is."""
    stream = CudaStream(Handle("s"), Rings(1))  # type: ignore[arg-type]  # as above
    stream.submit(lambda: entered.append("work"))
    assert entered == ["GPU 1", "stream s", "work", "not stream s", "not GPU 1"]
    entered.clear()
    looked = SimpleNamespace(
        query=lambda: entered.append("query"), synchronize=lambda: entered.append("wait")
    )
    event = CudaEvent(looked, Handle("s"), Rings(1))  # type: ignore[arg-type]  # as above
    event.is_done()
    event.synchronize()
    assert entered == ["GPU 1", "query", "not GPU 1", "GPU 1", "wait", "not GPU 1"]


def test_a_gpu_that_has_failed_is_told_as_such(entered: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """By whatever asks it next; it is no bug of ours that somebody should report."""

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    broken = SimpleNamespace(query=fail, synchronize=fail)
    event = CudaEvent(broken, Handle("s"), Rings(1))  # type: ignore[arg-type]  # as above
    stream = CudaStream(SimpleNamespace(device=1, wait_event=fail), Rings(1))  # type: ignore[arg-type]  # as above
    monkeypatch.setattr(cuda_stream, "record", fail)
    for ask in (event.is_done, event.synchronize, stream.record, lambda: stream.wait_event(event)):
        with pytest.raises(DeviceFailed, match=r"^1: CUDA error: an illegal .*; start this process again$"):
            ask()


# The device, with two GPUs that are not there -------------------------------------------------------------


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """GPU and priority of each stream that was made."""
    found: list[tuple[int, int]] = []

    def take_stream(*of: int) -> object:
        found.append(of)  # type: ignore[arg-type]  # two numbers
        return Handle(len(found))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(cuda, "take_stream", take_stream)
    return found


def test_a_closed_stream_is_the_next_one_that_is_opened(
    taken: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A digest opens one: two for each version, if sources are watched."""
    finished: list[tuple[int, int, str]] = []
    monkeypatch.setattr(cuda, "finish", lambda *of: finished.append(of))
    device = CudaDevice(1)
    gather = device.open_stream("gather", background=True)
    for _ in range(100):
        stream = device.open_stream("digest")
        stream.close()
        stream.close()
    assert taken == [(1, cuda_stream.LOW), (1, cuda_stream.HIGH)]
    with pytest.raises(EndpointClosed, match="stream of a GPU is closed"):
        stream.submit(lambda: None)
    device.close()
    device.close()
    gather.close()
    assert finished == [(1, cuda_stream.LOW, "1"), (1, cuda_stream.HIGH, "2")]
    with pytest.raises(EndpointClosed, match=r"'late': cuda:1 is closed"):
        device.open_stream("late")


def test_a_device_whose_gpu_has_failed_closes_and_its_streams_serve_nobody(
    taken: list[tuple[int, int]], entered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the adapter's own error would be lost in another one, and descriptors with it."""
    closed: list[object] = []

    def record(stream: object) -> object:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(cuda_stream, "record", record)
    monkeypatch.setattr(torch.cuda, "ExternalStream", Handle)
    device = CudaDevice(1)
    device.open_stream("gather")
    device._rings._streams[7] = Handle("ring")  # type: ignore[assignment]  # as above
    bell = SimpleNamespace(close=lambda: closed.append(bell))
    device._rings._bells[object()] = bell  # type: ignore[index, assignment]  # no loop, no bell
    device.close()
    assert closed == [bell]
    assert not cuda_stream.IDLE_STREAMS._handles


def test_page_locks_last_as_long_as_the_memory(
    taken: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(cuda, "why_missing", lambda: None)
    monkeypatch.setattr(cuda, "current", lambda index: nullcontext())
    monkeypatch.setattr(cuda, "call", lambda *call: calls.append(call))
    device = CudaDevice(1)
    buffer = device.allocate(4096, "pinned", shared=True)
    view, address = buffer.view, buffer.tensor.data_ptr()
    assert calls == [("cuMemHostRegister", address, 4096, 3)]
    del buffer
    assert len(calls) == 1
    del view
    assert calls[1:] == [("cuMemHostUnregister", address)]
    assert device.allocate(0, "pinned").nbytes == 0
    assert len(calls) == 2, "nothing to lock"


def test_memory_that_cannot_be_page_locked_is_refused_with_a_remedy_and_not_unlocked(
    taken: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []

    def call(name: str, *_: object) -> None:
        calls.append(name)
        raise DriverError(f"{name} failed with CUDA_ERROR_OUT_OF_MEMORY")

    monkeypatch.setattr(cuda, "why_missing", lambda: None)
    monkeypatch.setattr(cuda, "current", lambda index: nullcontext())
    monkeypatch.setattr(cuda, "call", call)
    device = CudaDevice(1)
    for lock in (lambda: device.allocate(4096, "pinned"), lambda: device.adopt(memoryview(bytearray(4096)))):
        with pytest.raises(
            ConfigError, match=r"(?s)cuda:1: 4096 bytes .*OUT_OF_MEMORY; set a smaller num_slots"
        ):
            lock()
    assert calls == ["cuMemHostRegister"] * 2


def test_memory_is_unlocked_without_a_word_when_the_driver_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the end of the process, and in one that was forked."""

    @contextmanager
    def current(index: int) -> Iterator[None]:
        raise DriverError("cuCtxPushCurrent failed with CUDA_ERROR_DEINITIALIZED")
        yield

    monkeypatch.setattr(cuda, "why_missing", lambda: None)
    monkeypatch.setattr(cuda, "current", current)
    cuda._unpin(0, 4096)


def test_a_gpu_without_room_says_what_to_set_and_keeps_no_stream(
    taken: list[tuple[int, int]], entered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    finished: list[object] = []

    def empty(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(cuda, "why_not_shared", lambda index: "no driver")
    monkeypatch.setattr(cuda, "finish", lambda *of: finished.append(of))
    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(ConfigError, match=r"cuda:1 has no 4096 bytes left: CUDA out .* slot_nbytes"):
        CudaDevice(1).allocate(4096, "device")
    assert len(taken) == len(finished) == 1


def test_streams_of_other_libraries_are_wrapped(
    taken: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Foreign:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, 0x77

    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: (handle, device))
    assert CudaDevice(1).wrap_stream(Foreign()).handle == (0x77, 1)

    class OfTorch:
        device, device_index = "cuda:0", 0

    monkeypatch.setattr(torch.cuda, "Stream", OfTorch)
    with pytest.raises(ConfigError, match="a stream of cuda:0 does not order work on cuda:1"):
        CudaDevice(1).wrap_stream(OfTorch())  # type: ignore[arg-type]  # as torch's has it
    assert isinstance(CudaDevice(0).wrap_stream(OfTorch()).handle, OfTorch)  # type: ignore[arg-type]  # as above


def test_a_forked_process_hears_that_cuda_does_not_survive_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(NativeUnavailable, match=r"forked from one that uses a GPU.*spawn"):
        CudaDevice(0)
