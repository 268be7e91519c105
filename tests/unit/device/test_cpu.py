"""The CPU device: lateness, failures, and that a missing wait shows. The rest is in `conformance`."""

from __future__ import annotations

import os
import threading
from contextlib import closing

import pytest
import torch

from wbridge.device.copy import Block, build_gather, build_scatter, gather, scatter
from wbridge.device.cpu import CpuDevice
from wbridge.device.select import open_device
from wbridge.errors import ConfigError, EndpointClosed, NativeUnavailable
from wbridge.native.extension import num_copy_threads, set_copy_threads, why_missing

pytestmark = pytest.mark.anyio

SEEDS = range(8)


@pytest.fixture(params=[None, 3])
def device(request: pytest.FixtureRequest):
    device = CpuDevice(seed=request.param)
    yield device
    device.close()


async def test_an_event_raises_what_its_work_raised_and_the_stream_goes_on(device: CpuDevice) -> None:
    stream, ran = device.open_stream("s"), []

    def fail() -> None:
        raise ValueError("broken copy")

    stream.submit(fail)
    stream.submit(lambda: ran.append("skipped"))
    failed = stream.record()
    stream.submit(lambda: ran.append("next"))
    await stream.record().wait()
    assert ran == ["next"]
    for _ in range(2):
        with pytest.raises(ValueError, match="broken copy"):
            await failed.wait()
    with pytest.raises(ValueError, match="broken copy"):
        failed.synchronize()


async def test_waiting_for_a_failed_event_skips_the_work_behind_it(device: CpuDevice) -> None:
    first, second, ran = device.open_stream("first"), device.open_stream("second"), []

    def fail() -> None:
        raise ValueError("broken copy")

    first.submit(fail)
    second.wait_event(first.record())
    second.submit(lambda: ran.append("must not run"))
    with pytest.raises(ValueError, match="broken copy"):
        await second.record().wait()
    assert ran == []


def test_the_caller_is_a_stream_whose_work_is_done_at_once() -> None:
    device = CpuDevice(seed=0)
    stream, caller, ran = device.open_stream("s"), device.current_stream(), []
    stream.submit(lambda: ran.append("held"))
    caller.wait_event(stream.record())
    caller.submit(lambda: ran.append("caller"))
    assert caller.record().is_done()
    assert ran == ["held", "caller"]
    device.close()


def test_closing_runs_what_was_submitted_and_ends_the_threads() -> None:
    before = threading.active_count()
    device, ran = CpuDevice(seed=0), []
    stream = device.open_stream("s")
    for k in range(10):
        stream.submit(lambda k=k: ran.append(k))
    device.close()
    device.close()
    assert ran == list(range(10))
    assert threading.active_count() == before
    with pytest.raises(EndpointClosed):
        stream.submit(lambda: None)
    with pytest.raises(EndpointClosed):
        device.open_stream("late")


def test_closed_streams_leave_no_thread_while_the_device_lives() -> None:
    device = CpuDevice()
    before = threading.active_count()
    for _ in range(20):
        stream = device.open_stream("epoch")
        stream.close()
        stream.join()
    assert threading.active_count() == before
    device.close()


def test_a_seed_gives_the_same_lateness_every_time() -> None:
    def lateness(seed: int) -> list[int]:
        device, ran, seen = CpuDevice(seed=seed), [], []
        stream = device.open_stream("s")
        for k in range(40):
            stream.submit(lambda k=k: ran.append(k))
            seen.append(len(ran))
        device.close()
        return seen

    assert all(lateness(seed) == lateness(seed) for seed in SEEDS)
    assert len({tuple(lateness(seed)) for seed in SEEDS}) > 1, "seeds differ"


def _is_torn(seed: int, *, wait_for_gather: bool, wait_for_scatter: bool) -> bool:
    """One update of 8 parameters, mutated right after it; True if the target is not the old version."""
    device = CpuDevice(seed=seed)
    sources = {f"p{k}": torch.full((16,), float(k)) for k in range(8)}
    targets = {name: torch.zeros(16) for name in sources}
    blocks = [Block(f"p{k}", (16,), 0, (1,), "float32", 64 * k, (1,)) for k in range(8)]
    buffer = device.allocate(64 * 8, "pinned")
    gathers, applies = device.open_stream("gather"), device.open_stream("apply")
    for block in blocks:
        gathered = gather(gathers, build_gather([block], sources), buffer)
    if wait_for_gather:
        gathered.synchronize()
    for source in sources.values():
        source.add_(100)
    if not wait_for_gather:
        gathered.synchronize()
    for block in blocks:
        applied = scatter(applies, build_scatter([block], targets), buffer)
    if wait_for_scatter:
        applied.synchronize()
    torn = any(bool((targets[f"p{k}"] != k).any()) for k in range(8))
    device.close()
    return torn


def test_c47_a_missing_wait_before_the_source_changes_is_a_torn_update() -> None:
    assert all(_is_torn(seed, wait_for_gather=False, wait_for_scatter=True) for seed in SEEDS)
    assert not any(_is_torn(seed, wait_for_gather=True, wait_for_scatter=True) for seed in SEEDS)


def test_a_missing_wait_after_the_apply_is_a_torn_update() -> None:
    assert all(_is_torn(seed, wait_for_gather=True, wait_for_scatter=False) for seed in SEEDS)


@pytest.mark.skipif(why_missing() is not None, reason=str(why_missing()))
def test_the_device_bounds_the_threads_of_a_copy() -> None:
    before = num_copy_threads()
    open_device("cpu", copy_threads=3).close()
    assert num_copy_threads() == 3
    open_device("cpu").close()
    assert num_copy_threads() == 3
    set_copy_threads(before)


def test_the_device_is_chosen_by_where_the_parameters_live() -> None:
    device = open_device("cpu")
    assert device.name == "cpu"
    device.close()
    with pytest.raises(ConfigError, match="'xpu'"):
        open_device("xpu")
    if not torch.cuda.is_available():
        with pytest.raises(NativeUnavailable, match="visible GPU"):
            open_device("cuda")


def test_work_in_the_background_has_a_low_priority() -> None:
    with closing(CpuDevice()) as device:
        found = []
        for background in (False, True):
            stream = device.open_stream("s", background=background)
            stream.submit(lambda: found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
            stream.record().synchronize()
        assert found[0] == os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) < found[1]
