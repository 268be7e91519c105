"""Virtual time: waiting is free, order is kept, a whole job needs no thread, and a deadlock is an error."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from tests.unit.session.job import running
from wbridge.errors import InternalError
from wbridge.testing.clock import run_virtual
from wbridge.testing.streams import LoopDevice


def test_sleeping_takes_no_time_and_timers_keep_their_order() -> None:
    woken: list[float] = []

    async def sleep(seconds: float) -> None:
        await anyio.sleep(seconds)
        woken.append(anyio.current_time())

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            for seconds in (3600.0, 1.0, 60.0):
                tasks.start_soon(sleep, seconds)

    begun_s = time.monotonic()
    run_virtual(main)
    assert woken == [1.0, 60.0, 3600.0]
    assert time.monotonic() - begun_s < 60.0


def test_bytes_on_a_socket_arrive_before_time_moves() -> None:
    async def main() -> float:
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
        async with listener, anyio.create_task_group() as tasks:

            async def answer(stream: anyio.abc.SocketStream) -> None:
                async with stream:
                    await stream.send(await stream.receive())

            tasks.start_soon(listener.serve, answer)
            port = listener.extra(anyio.abc.SocketAttribute.local_port)
            async with await anyio.connect_tcp("127.0.0.1", port) as stream:
                with anyio.fail_after(60.0):
                    await stream.send(b"x")
                    assert await stream.receive() == b"x"
            tasks.cancel_scope.cancel()
        return anyio.current_time()

    assert run_virtual(main) == 0.0


def test_work_for_threads_runs_in_the_loop() -> None:
    async def main() -> int:
        return await anyio.to_thread.run_sync(threading.get_ident)

    before = anyio.to_thread.run_sync
    assert run_virtual(main) == threading.get_ident()
    assert anyio.to_thread.run_sync is before


def test_random_pauses_depend_on_the_seed_alone() -> None:
    async def main() -> float:
        return random.random()

    state = random.getstate()
    assert run_virtual(main, seed=1) == run_virtual(main, seed=1) != run_virtual(main, seed=2)
    assert random.getstate() == state


def test_waiting_for_nothing_is_an_error() -> None:
    async def main() -> None:
        await anyio.Event().wait()

    with pytest.raises(InternalError, match="everybody waits"):
        run_virtual(main)


def test_a_whole_job_runs_without_threads_and_the_same_way_twice(tmp_path: Path) -> None:
    ends_s = []

    async def main() -> None:
        device = LoopDevice()
        async with running(tmp_path, "async", devices=(device, device)) as job:
            for version in (1, 2):
                await job.update(version)
                assert job.holds(version)
            assert await job.receivers[0].poll_requests(wait_s=5.0) is None
            assert threading.active_count() == 1
            ends_s.append(anyio.current_time())
        assert device.num_open == device.num_pending == 0

    run_virtual(main)
    run_virtual(main)
    assert ends_s[0] == ends_s[1] > 5.0
