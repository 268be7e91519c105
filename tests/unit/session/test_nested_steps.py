"""Steps inside steps, and steps that wait for each other, while an update waits for all of them."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread
import pytest

import wbridge
from tests.unit.session.job import PATIENCE_S, Job, gather, running, running_sync, together
from wbridge.errors import ProtocolError
from wbridge.session.rollout import Rollout

pytestmark = pytest.mark.anyio
ONE = {"engine-0": 1}


def waits_for_steps(rollout: Rollout) -> bool:
    """An update has met an open step, and waits for it."""
    return rollout.gate._drained is not None


async def until_update_waits(job: Job) -> None:
    while not waits_for_steps(job.receivers[0]._rollout):
        await anyio.sleep(0.001)


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_a_step_inside_a_step_of_its_task_begins_at_once(mode: str, tmp_path: Path) -> None:
    async with running(tmp_path, mode, num_trainers=1, engines=ONE) as job:
        receiver = job.receivers[0]
        await job.update(1)
        async with anyio.create_task_group() as tasks, receiver.step() as outer:
            tasks.start_soon(job.update, 2)
            await until_update_waits(job)
            async with receiver.step() as inner:
                with receiver.step() as innermost:
                    assert outer == inner == innermost == 1
                    assert job.holds(1)
            async with receiver.step() as again:
                assert again == 1
            assert job.holds(1)
        assert job.holds(2)
        async with receiver.step() as version:
            assert version == 2


async def test_a_step_in_a_task_or_thread_that_a_step_started_begins_at_once(tmp_path: Path) -> None:
    async with running(tmp_path, "async", num_trainers=1, engines=ONE) as job:
        receiver = job.receivers[0]
        await job.update(1)

        async def part() -> int | None:
            async with receiver.step() as version:
                await anyio.lowlevel.checkpoint()
                return version

        def blocking_part() -> int | None:
            with receiver.step() as version:
                return version

        async def serve() -> None:
            async with receiver.step() as outer:
                await until_update_waits(job)
                versions = await gather(part, part, lambda: anyio.to_thread.run_sync(blocking_part))
                assert versions == [outer] * 3

        await gather(serve, lambda: job.update(2))
        assert job.holds(2)


async def test_a_task_that_outlives_the_step_it_was_started_in_takes_its_turn(tmp_path: Path) -> None:
    async with running(tmp_path, "async", num_trainers=1, engines=ONE) as job:
        receiver, other_may_end = job.receivers[0], anyio.Event()
        await job.update(1)
        seen: list[int | None] = []

        async def late() -> None:
            await until_update_waits(job)
            async with receiver.step() as version:  # the step it came from has ended
                seen.append(version)

        async def other() -> None:
            async with receiver.step():
                await other_may_end.wait()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(other)
            async with receiver.step():
                tasks.start_soon(late)
            tasks.start_soon(job.update, 2)
            await until_update_waits(job)
            for _ in range(5):
                await anyio.lowlevel.checkpoint()
            assert seen == []
            other_may_end.set()
        assert seen == [2]


async def test_steps_of_two_receivers_are_independent(tmp_path: Path) -> None:
    engines = {"engine-0": 1, "engine-1": 1}
    async with running(tmp_path, "async", num_trainers=1, engines=engines) as job:
        first, second = job.receivers
        await job.update(1)
        async with first.step():
            deliveries, _ = await gather(lambda: job.send(2), lambda: job.take(1))
            async with second.step() as version:
                assert version == 2
                async with first.step() as inner:
                    assert inner == 1
        await job.take(0)
        assert await deliveries[0].applied() == {"engine-0": "applied", "engine-1": "applied"}  # type: ignore[union-attr]  # a list of deliveries


def test_a_blocking_step_inside_a_step_of_its_thread_begins_at_once(tmp_path: Path) -> None:
    with running_sync(tmp_path, "async", num_trainers=1, engines=ONE) as job:
        receiver = job.receivers[0]
        job.update(1)
        is_open: Future[None] = Future()

        def serve() -> list[int | None]:
            with receiver.step() as outer:
                is_open.set_result(None)
                while not waits_for_steps(receiver._rollout):
                    pass
                with receiver.step() as inner:
                    return [outer, inner]

        def update() -> list[int | None]:
            is_open.result(PATIENCE_S)
            job.update(2)
            return [receiver.version]

        assert together(serve, update) == [[1, 1], [2]]


async def test_a_poll_inside_a_step_is_refused_at_once(tmp_path: Path) -> None:
    async with running(tmp_path, "async", num_trainers=1, engines=ONE) as job:
        receiver = job.receivers[0]
        async with receiver.step():
            with pytest.raises(ProtocolError, match="inside step"):
                await receiver.poll_requests()
        with receiver.step(), pytest.raises(ProtocolError, match="poll between steps"):
            await receiver.poll_requests(wait_s=1)
        await job.update(1)
        assert job.holds(1)


def test_a_blocking_poll_inside_a_step_is_refused_at_once(tmp_path: Path) -> None:
    with running_sync(tmp_path, "async", num_trainers=1, engines=ONE) as job:
        with job.receivers[0].step(), pytest.raises(ProtocolError, match="inside step"):
            job.receivers[0].poll_requests()
        job.update(1)
        assert job.holds(1)


async def test_one_step_object_is_one_forward_pass(tmp_path: Path) -> None:
    async with running(tmp_path, "async", num_trainers=1, engines=ONE) as job:
        step = job.receivers[0].step()
        with step, pytest.raises(ProtocolError, match="open already"), step:
            pass
        with step:
            pass
        await job.update(1)


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_a_step_that_waits_for_another_tasks_step_holds_an_update_for_the_hold_timeout_only(
    mode: str, tmp_path: Path
) -> None:
    """The second step waits for the update, which waits for the first, which waits for the second."""
    async with running(tmp_path, mode, num_trainers=1, engines=ONE, hold_timeout_s=0.1) as job:
        receiver, first_is_open, second_is_over = job.receivers[0], anyio.Event(), anyio.Event()

        async def first() -> None:
            async with receiver.step():
                first_is_open.set()
                await second_is_over.wait()

        async def second() -> None:
            await first_is_open.wait()
            await until_update_waits(job)
            async with receiver.step() as version:
                assert version is None
            second_is_over.set()

        await gather(first, second, lambda: job.update(1))
        assert job.holds(1)


async def test_a_cancelled_poll_does_not_wait_for_open_steps(tmp_path: Path) -> None:
    async with running(tmp_path, "async", num_trainers=1, engines=ONE) as job:
        receiver = job.receivers[0]
        async with receiver.step():
            async with anyio.create_task_group() as tasks:

                async def poll() -> None:
                    await receiver.poll_requests(wait_s=PATIENCE_S)

                tasks.start_soon(poll)
                await job.send(1)
                await until_update_waits(job)
                tasks.cancel_scope.cancel()
            async with receiver.step() as version:
                assert version is None
        await job.take()
        assert job.holds(1)


def test_threads_with_nested_steps_run_on_whole_versions(tmp_path: Path) -> None:
    with running_sync(tmp_path, "async", num_trainers=1, engines=ONE) as job:
        receiver, rollout = job.receivers[0], job.rollouts[0]
        job.update(1)
        done = threading.Event()

        def serve() -> list[wbridge.Update | None]:
            while not done.is_set():
                with receiver.step() as outer, receiver.step() as inner:
                    assert outer is not None
                    assert outer == inner
                    assert rollout.holds(outer)
            return []

        def update() -> list[wbridge.Update | None]:
            try:
                return [job.update(version)[1][0] for version in (2, 3, 4)]
            finally:
                done.set()

        *_, updates = together(serve, serve, update)
        assert [update.version for update in updates if update] == [2, 3, 4]


async def test_tasks_that_start_each_other_inside_steps_keep_none_that_have_ended(tmp_path: Path) -> None:
    """A server may begin each forward pass from inside the one before it, for as long as it runs."""
    async with running(tmp_path, num_trainers=1, engines=ONE) as job:
        steps = [job.receivers[0].step() for _ in range(4)]
        entered, left = ([anyio.Event() for _ in steps] for _ in range(2))

        async def go(index: int) -> None:
            async with steps[index]:
                entered[index].set()
                if index > 0:
                    await left[index - 1].wait()
                if index + 1 < len(steps):
                    tasks.start_soon(go, index + 1)
                    await entered[index + 1].wait()
            left[index].set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(go, 0)
        assert [step._outer for step in steps] == [None] * 4
