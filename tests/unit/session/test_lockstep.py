"""All workers of an engine take a version at the same poll, and an idle poll costs nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

import wbridge
from tests.models.toy import Rollout
from tests.unit.session.job import MODES, gather, rendezvous, running, running_sync, settings, together
from wbridge.errors import EndpointClosed, ProtocolError

pytestmark = pytest.mark.anyio
ENGINE = {"engine-0": 2}


@pytest.mark.parametrize("mode", MODES)
async def test_both_workers_apply_at_the_same_poll(mode: str, tmp_path: Path) -> None:
    taken: dict[int, list[tuple[int, int]]] = {0: [], 1: []}

    async with running(tmp_path, mode, engines=ENGINE) as job:
        num_polls, changed = [0, 0], anyio.Condition()

        async def step(index: int) -> None:
            """A step that needs the other worker's step before it, as tensor parallelism does."""
            async with changed:
                num_polls[index] += 1
                changed.notify_all()
                while num_polls[1 - index] < num_polls[index] - 1:
                    await changed.wait()

        async def roll(index: int, passes: int) -> None:
            receiver = job.receivers[index]
            while receiver.version != 3:
                await step(index)
                for _ in range(passes):
                    await anyio.lowlevel.checkpoint()
                if update := await receiver.poll_requests():
                    taken[index].append((num_polls[index], update.version))
                    assert job.rollouts[index].holds(update.version)

        async def train() -> None:
            for version in (1, 2, 3):
                await (await job.send(version))[0].applied()

        await gather(train, lambda: roll(0, 1), lambda: roll(1, 3))
    assert taken[0] == taken[1]
    assert [version for _, version in taken[0]] == [1, 2, 3]


def test_both_workers_apply_at_the_same_poll_in_threads(tmp_path: Path) -> None:
    with running_sync(tmp_path, "receiver_overlap", engines=ENGINE) as job:
        num_polls, changed = [0, 0], threading.Condition()

        def roll(index: int) -> list[int]:
            polls = []
            while job.receivers[index].version != 3:
                with changed:
                    num_polls[index] += 1
                    changed.notify_all()
                    changed.wait_for(lambda: num_polls[1 - index] >= num_polls[index] - 1)
                if job.receivers[index].poll_requests():
                    polls.append(num_polls[index])
            return polls

        def train(index: int) -> list[int]:
            for version in (1, 2, 3):
                job.trainers[index].set_version(version)
                job.senders[index].send_weights(version).applied()
            return []

        _, _, first, second = together(lambda: train(0), lambda: train(1), lambda: roll(0), lambda: roll(1))
        assert first == second
        assert len(first) == 3
        assert job.holds(3)


async def test_an_idle_poll_neither_sends_nor_suspends(tmp_path: Path) -> None:
    async with running(tmp_path, "async", engines=ENGINE) as job:
        deliveries, _ = await job.update(1)
        await deliveries[0].applied()
        before = [adapter.counters for adapter in (*job.senders, *job.receivers)]
        num_suspended = 0
        begun_s = time.monotonic()
        for _ in range(1000):
            poll = job.receivers[0].poll_requests()
            try:
                poll.send(None)
            except StopIteration as stop:
                assert stop.value is None
            else:
                num_suspended += 1
            poll.close()
        elapsed_ms = 1000 * (time.monotonic() - begun_s)
        assert num_suspended <= elapsed_ms + 1
        assert [adapter.counters for adapter in (*job.senders, *job.receivers)] == before


async def test_a_waiting_poll_ends_with_its_time_or_with_an_update(tmp_path: Path) -> None:
    async with running(tmp_path, "sync", num_trainers=1, engines={"engine-0": 1}) as job:
        assert await job.receivers[0].poll_requests(wait_s=0.02) is None
        await job.update(1)
        assert await job.receivers[0].poll_requests(wait_s=0.02) is None
        assert job.receivers[0].version == 1


async def test_updates_yields_each_applied_update(tmp_path: Path) -> None:
    async with running(tmp_path, "sync", num_trainers=1, engines={"engine-0": 1}) as job:
        versions: list[int] = []

        async def follow() -> None:
            async for update in job.receivers[0].updates():
                versions.append(update.version)
                assert job.rollouts[0].holds(update.version)
                if len(versions) == 3:
                    return

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follow)
            for version in (1, 2, 3):
                await (await job.send(version))[0].applied()
        assert versions == [1, 2, 3]


def test_updates_yields_each_applied_update_in_the_blocking_adapter(tmp_path: Path) -> None:
    with running_sync(tmp_path, "sync", num_trainers=1, engines={"engine-0": 1}) as job:

        def follow() -> list[int]:
            updates = job.receivers[0].updates()
            return [next(updates).version for _ in range(3)]

        def train() -> list[int]:
            for version in (1, 2, 3):
                job.trainers[0].set_version(version)
                job.senders[0].send_weights(version).applied()
            return []

        assert together(follow, train)[0] == [1, 2, 3]
        assert job.holds(3)


async def test_polls_that_drift_apart_are_an_error(tmp_path: Path) -> None:
    async with running(tmp_path, "async", engines=ENGINE, max_poll_skew=4) as job:
        for _ in range(10):
            assert await job.receivers[0].poll_requests() is None
        await (await job.send(1))[0].landed()
        for index in (0, 1):
            text = r"max_poll_skew = 4 apart \(worker 0: poll \d+, worker 1: poll 1\); all workers"
            with pytest.raises(ProtocolError, match=text):
                while await job.receivers[index].poll_requests() is None:
                    await anyio.sleep(0.001)
        assert [receiver.version for receiver in job.receivers] == [None, None]


async def test_a_hold_that_one_worker_never_reaches_ends_and_comes_again(tmp_path: Path) -> None:
    async with running(tmp_path, "async", engines=ENGINE, hold_timeout_s=0.1) as job:
        await (await job.send(1))[0].landed()
        assert await job.receivers[0].poll_requests(wait_s=0.3) is None  # parked, and let go
        assert [receiver.version for receiver in job.receivers] == [None, None]
        await job.take()
        assert job.holds(1)


class Silent:
    def before_apply(self) -> None:
        return

    def after_apply(self, update: wbridge.Update | None) -> None:
        return


@pytest.mark.parametrize(("hooks", "num_changes"), [({}, 1), ({0: Silent()}, 2)])
async def test_a_poll_that_applies_changes_threads_once(
    hooks: dict[int, Silent], num_changes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is ready before it is asked, and answers from the loop; hooks run when it is asked."""
    async with running(tmp_path, "async", engines={"engine-0": 1}, hooks=hooks) as job:
        await (await job.send(1))[0].landed()
        rollout = job.receivers[0]._rollout
        assert rollout._lockstep is not None
        while not rollout._lockstep.follower.flag:
            await anyio.sleep(0.001)
        loop, submitted = rollout._worker.loop, []
        call = loop.call

        def count(function: Callable[[], object]) -> None:
            submitted.append(function)
            call(function)

        monkeypatch.setattr(loop, "call", count)
        update = await job.receivers[0].poll_requests()
        monkeypatch.undo()
        assert (update and update.version, len(submitted)) == (1, num_changes)
        async with job.receivers[0].step() as version:
            assert version == 1  # steps begin again


async def test_a_poll_before_connect_says_so(tmp_path: Path) -> None:
    receiver = wbridge.ReceiverAdapter(
        Rollout().target, rendezvous=rendezvous(tmp_path), config=settings("sync", 1)
    )
    with pytest.raises(EndpointClosed, match="connect"):
        await receiver.poll_requests()
    await receiver.aclose()


async def test_sleeping_until_an_update_is_no_stall(tmp_path: Path) -> None:
    async with running(tmp_path, "async", num_trainers=1, engines={"engine-0": 1}) as job:
        updates: list[wbridge.Update] = []

        async def wait() -> None:
            updates.extend(await job.take(0))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            while not job.receivers[0]._rollout._lockstep.follower._waiting:
                await anyio.sleep(0.001)
            sent_s = time.perf_counter()
            await job.send(1)
        assert 0 < updates[0].stats.stall_s < time.perf_counter() - sent_s


async def test_a_poll_beside_another_one_is_refused_at_once(tmp_path: Path) -> None:
    async with running(tmp_path, "async", num_trainers=1, engines={"engine-0": 1}) as job:
        taken: list[wbridge.Update | None] = []
        receiver = job.receivers[0]

        async def poll() -> None:
            taken.append(await receiver.poll_requests(wait_s=20))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(poll)
            await anyio.wait_all_tasks_blocked()
            for wait_s in (None, 0.0, 20.0):
                with pytest.raises(ProtocolError, match="another one has not returned"):
                    await receiver.poll_requests(wait_s)
            with pytest.raises(ProtocolError, match="another one has not returned"):
                await anyio.to_thread.run_sync(receiver._rollout.begin_poll)  # as the blocking twin does
            await job.send(1)
        assert [update.version for update in taken if update] == [1]
        assert await receiver.poll_requests() is None
        with anyio.move_on_after(0):
            await receiver.poll_requests(wait_s=20)
        assert (await job.update(2))[1][0].version == 2
