"""What the CUDA device does around the driver, with fakes where it is called."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch

from wbridge.device import cuda
from wbridge.device.cuda import CudaStream, Rings, _unpin
from wbridge.device.cuda_driver import DriverError


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
    monkeypatch.setattr(cuda, "why_no_rings", lambda: None)
    monkeypatch.setattr(cuda, "_take_stream", lambda *_: stream)
    monkeypatch.setattr(cuda, "_give_back", lambda *_: None)
    monkeypatch.setattr(cuda, "_record", lambda _: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(cuda, "ring_behind", ring_behind)
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

    monkeypatch.setattr(cuda, "_take_stream", take_stream)
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


@pytest.mark.anyio
async def test_work_that_fails_midway_is_told_when_what_it_launched_is_over(
    rung: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its slot would count as unused while the GPU writes it."""
    launched = Event(3)

    def fail() -> None:
        raise RuntimeError("no memory for the second half")

    rings, handle = Rings(0), SimpleNamespace(cuda_stream=7)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(cuda, "_record", lambda _: SimpleNamespace(query=launched.is_done))
    stream = CudaStream(handle, rings, 0)  # type: ignore[arg-type]  # a stream without a GPU
    stream.submit(fail)
    with pytest.raises(RuntimeError, match="second half"):
        await stream.record().wait()
    assert launched.num_looks < 0
    await stream.record().wait()


def test_page_locks_are_undone_without_harm_to_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """And at the end of the process, when the driver says no more."""
    calls: list[str] = []

    @contextmanager
    def relaxed() -> Iterator[None]:
        if calls:
            raise DriverError("cuThreadExchangeStreamCaptureMode failed with CUDA_ERROR_DEINITIALIZED")
        calls.append("relaxed")
        yield
        calls.append("as before")

    monkeypatch.setattr(cuda, "relaxed", relaxed)
    runtime: Any = SimpleNamespace(cudaHostUnregister=lambda address: calls.append(f"unlocked {address}"))
    for _ in range(2):
        _unpin(runtime, 4096)
    assert calls == ["relaxed", "unlocked 4096", "as before"]
