"""Bells: rung without the GIL from any thread, heard by one loop, however many wait."""

from __future__ import annotations

import ctypes
import os
import threading

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from wbridge.device import wakeup
from wbridge.device.wakeup import Bell
from wbridge.native.extension import ring_address, why_missing


def ring(bell: Bell) -> None:
    os.eventfd_write(bell.descriptor, 1)


def nothing() -> None:
    """Somebody else will ring."""


@pytest.mark.anyio
@pytest.mark.skipif(why_missing() is not None, reason="the extension was not built")
async def test_the_native_function_rings() -> None:
    bell, done = Bell(), threading.Event()
    native = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(ring_address())

    def ask() -> None:
        done.set()
        threading.Thread(target=native, args=(bell.descriptor,)).start()

    await bell.wait(done.is_set, ask)
    bell.close()


@pytest.mark.anyio
async def test_one_ring_wakes_those_whose_work_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wakeup, "_PATIENCE_S", 60.0)
    bell, over, woken = Bell(), set[int](), list[int]()

    async def wait(k: int) -> None:
        await bell.wait(lambda: k in over, nothing)
        woken.append(k)

    async with anyio.create_task_group() as tasks:
        for k in range(5):
            tasks.start_soon(wait, k)
        await anyio.wait_all_tasks_blocked()
        over.update((1, 3))
        ring(bell)
        while len(woken) < 2:
            await anyio.lowlevel.checkpoint()
        await anyio.wait_all_tasks_blocked()
        assert sorted(woken) == [1, 3]
        over.update(range(5))
        for _ in range(3):
            ring(bell)
    assert sorted(woken) == [0, 1, 2, 3, 4]
    bell.close()


@pytest.mark.anyio
async def test_what_is_over_asks_for_no_ring() -> None:
    bell = Bell()
    await bell.wait(lambda: True, lambda: pytest.fail("asked"))
    bell.close()


@pytest.mark.anyio
async def test_a_device_that_does_not_ring_is_looked_at_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wakeup, "_PATIENCE_S", 0.001)
    bell, num_looks = Bell(), 0

    def fails_at_last() -> bool:
        nonlocal num_looks
        num_looks += 1
        if num_looks > 3:
            raise RuntimeError("the device has failed")
        return False

    with pytest.raises(RuntimeError, match="has failed"):
        await bell.wait(fails_at_last, nothing)
    bell.close()


@pytest.mark.anyio
async def test_a_long_wait_asks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device's queue is bounded, and the loop stands still while it is full."""
    monkeypatch.setattr(wakeup, "_PATIENCE_S", 0.0)
    bell, looks, asked = Bell(), iter([False] * 20 + [True]), list[bool]()
    await bell.wait(lambda: next(looks), lambda: asked.append(True))
    assert asked == [True]
    bell.close()


@pytest.mark.anyio
async def test_closing_lets_those_go_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wakeup, "_PATIENCE_S", 60.0)
    bell = Bell()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bell.wait, lambda: False, nothing)
        await anyio.wait_all_tasks_blocked()
        await anyio.to_thread.run_sync(bell.close)
    await bell.wait(lambda: False, lambda: pytest.fail("asked"))


@pytest.mark.anyio
async def test_a_failure_that_is_heard_reaches_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wakeup, "_PATIENCE_S", 60.0)
    bell, failed = Bell(), threading.Event()

    def is_over() -> bool:
        if failed.is_set():
            raise RuntimeError("the device has failed")
        return False

    def ask() -> None:
        failed.set()
        ring(bell)

    with pytest.raises(RuntimeError, match="has failed"):
        await bell.wait(is_over, ask)
    bell.close()


@pytest.mark.anyio
async def test_a_cancelled_wait_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wakeup, "_PATIENCE_S", 60.0)
    bell, over = Bell(), threading.Event()
    with anyio.move_on_after(0.001):
        await bell.wait(lambda: False, nothing)
    ring(bell)  # what the cancelled one had asked for
    await bell.wait(over.is_set, lambda: (over.set(), ring(bell))[0])
    bell.close()


@pytest.mark.anyio
async def test_a_bell_may_be_closed_by_any_thread_and_twice() -> None:
    bell = Bell()
    descriptor = bell.descriptor
    await anyio.to_thread.run_sync(bell.close)
    bell.close()
    await anyio.wait_all_tasks_blocked()
    with pytest.raises(OSError):
        os.fstat(descriptor)


def test_a_bell_may_outlive_its_loop() -> None:
    made: list[Bell] = []

    async def make() -> None:
        made.append(Bell())

    anyio.run(make)
    made[0].close()
    with pytest.raises(OSError):
        os.fstat(made[0].descriptor)
