"""Hooks and steps: what the application runs around an update, and what it never sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest

import wbridge
from tests.unit.session.job import MODES, PATIENCE_S, gather, running, running_sync, together
from wbridge.errors import UpdateAborted

pytestmark = pytest.mark.anyio
ONE = {"engine-0": 1}


class Recorder:
    """Hooks that write down when they ran; they can be told to fail once."""

    def __init__(self) -> None:
        self.calls: list[object] = []
        self.fail_before: Exception | None = None
        self.fail_after: Exception | None = None

    def before_apply(self) -> None:
        self.calls.append("before")
        error, self.fail_before = self.fail_before, None
        if error:
            raise error

    def after_apply(self, update: wbridge.Update | None) -> None:
        self.calls.append(update.version if update else None)
        error, self.fail_after = self.fail_after, None
        if error:
            raise error


class AsyncRecorder(Recorder):
    """The same, awaited."""

    async def before_apply(self) -> None:  # type: ignore[override]  # the protocol allows both
        await anyio.lowlevel.checkpoint()
        super().before_apply()

    async def after_apply(self, update: wbridge.Update | None) -> None:  # type: ignore[override]  # as above
        await anyio.lowlevel.checkpoint()
        super().after_apply(update)


@pytest.mark.parametrize("kind", [Recorder, AsyncRecorder])
@pytest.mark.parametrize("mode", MODES)
async def test_hooks_run_around_the_write(mode: str, kind: type[Recorder], tmp_path: Path) -> None:
    class Looking(kind):  # type: ignore[valid-type, misc]  # both kinds
        def before_apply(self) -> Any:  # Any: sync or async
            assert not job.holds(1)
            return super().before_apply()

        def after_apply(self, update: wbridge.Update | None) -> Any:  # Any: as above
            assert job.holds(1)
            return super().after_apply(update)

    hooks = Looking()
    async with running(tmp_path, mode, num_trainers=1, engines=ONE, hooks={0: hooks}) as job:
        await job.update(1)
    assert hooks.calls == ["before", 1]


async def test_a_refusal_releases_the_whole_engine_on_its_old_version(tmp_path: Path) -> None:
    hooks = {0: Recorder(), 1: Recorder()}
    engines = {"engine-0": 2}
    async with running(tmp_path, "async", engines=engines, hooks=hooks, hold_timeout_s=0.2) as job:
        await job.update(1)
        hooks[1].fail_before = RuntimeError("cache is busy")
        await (await job.send(2))[0].landed()

        async def refuse() -> None:
            with pytest.raises(RuntimeError, match="cache is busy"):
                await job.receivers[1].poll_requests(wait_s=PATIENCE_S)

        async def let_go() -> None:
            while hooks[0].calls[-1] is not None:
                await anyio.sleep(0.001)
                assert await job.receivers[0].poll_requests() is None

        await gather(refuse, let_go)
        assert [receiver.version for receiver in job.receivers] == [1, 1]
        assert job.holds(1)
        assert hooks[1].calls == ["before", 1, "before", None]

        await job.take()
        assert job.holds(2)
        assert hooks[0].calls[-2:] == hooks[1].calls[-2:] == ["before", 2]


async def test_an_error_after_the_apply_is_raised_and_the_version_stays(tmp_path: Path) -> None:
    hooks = Recorder()
    async with running(tmp_path, "async", num_trainers=1, engines=ONE, hooks={0: hooks}) as job:
        hooks.fail_after = RuntimeError("cannot resume")
        delivery = (await job.send(1))[0]
        with pytest.raises(RuntimeError, match="cannot resume"):
            await job.receivers[0].poll_requests(wait_s=PATIENCE_S)
        assert job.receivers[0].version == 1
        assert job.holds(1)
        assert await delivery.applied() == {"engine-0": "applied"}
        with job.receivers[0].step() as version:
            assert version == 1
        await job.update(2)
        assert job.holds(2)


def test_the_blocking_adapter_refuses_async_hooks(tmp_path: Path) -> None:
    with running_sync(tmp_path, "async", num_trainers=1, engines=ONE, hooks={0: AsyncRecorder()}) as job:
        job.senders[0].send_weights(1)
        with pytest.raises(TypeError, match="is async; the blocking adapter needs a plain function"):
            job.receivers[0].poll_requests(wait_s=PATIENCE_S)
        assert job.receivers[0].version is None


def test_the_blocking_adapter_runs_plain_hooks_in_the_callers_thread(tmp_path: Path) -> None:
    hooks = Recorder()
    with running_sync(tmp_path, "sync", num_trainers=1, engines=ONE, hooks={0: hooks}) as job:
        job.update(1)
        assert hooks.calls == ["before", 1]


@pytest.mark.parametrize("mode", MODES)
async def test_an_update_waits_for_open_steps(mode: str, tmp_path: Path) -> None:
    class Asked(Recorder):
        asked = anyio.Event()

        def before_apply(self) -> None:
            self.asked.set()

    hooks = Asked()
    async with running(tmp_path, mode, num_trainers=1, engines=ONE, hooks={0: hooks}) as job:
        receiver = job.receivers[0]
        async with anyio.create_task_group() as tasks, receiver.step() as version:
            assert version is None
            tasks.start_soon(job.update, 1)
            await hooks.asked.wait()
            for _ in range(20):
                await anyio.lowlevel.checkpoint()
            assert receiver.version is None
            assert float(job.rollouts[0].parameters["scale"]) == -1.0
        assert receiver.version == 1
        async with receiver.step() as version:
            assert version == 1
            assert job.holds(1)


async def test_c48_overlapping_requests_run_on_whole_versions(tmp_path: Path) -> None:
    async with running(tmp_path, "async", num_trainers=1, engines=ONE) as job:
        receiver, rollout = job.receivers[0], job.rollouts[0]
        await job.update(1)
        seen: set[int | None] = set()

        async def request(passes: int) -> None:
            while receiver.version != 4:
                async with receiver.step() as version:
                    assert version is not None
                    assert rollout.holds(version)
                    for _ in range(passes):
                        await anyio.lowlevel.checkpoint()
                    assert rollout.holds(version)
                    assert receiver.version == version
                    seen.add(version)
                await anyio.sleep(0.001)

        async with anyio.create_task_group() as tasks:
            for passes in range(1, 7):
                tasks.start_soon(request, passes)
            for version in (2, 3, 4):
                deliveries, _ = await job.update(version)
                assert await deliveries[0].applied() == {"engine-0": "applied"}
                assert job.holds(version)
        assert {1, 2, 3} <= seen


def test_a_blocking_step_keeps_its_version_while_another_thread_polls(tmp_path: Path) -> None:
    with running_sync(tmp_path, "async", num_trainers=1, engines=ONE) as job:
        receiver = job.receivers[0]
        job.update(1)

        def serve() -> set[int | None]:
            seen = set()
            while receiver.version != 3:
                with receiver.step() as version:
                    assert version is not None
                    assert job.rollouts[0].holds(version)
                    seen.add(version)
            return seen

        def update() -> set[int | None]:
            job.update(2)
            job.update(3)
            return set()

        assert 1 in together(serve, update)[0] | {1}
        assert job.holds(3)


def failing_once(message: str) -> Any:  # Any: a callable with state
    errors = [RuntimeError(message)]

    def after_apply() -> None:
        if errors:
            raise errors.pop()

    return after_apply


@pytest.mark.parametrize("mode", MODES)
async def test_c45_a_failure_midway_taints_the_engine_until_a_whole_version_lands(
    mode: str, tmp_path: Path
) -> None:
    fails = failing_once("cannot repack")

    def retarget(index: int, target: wbridge.Target) -> wbridge.Target:
        return msgspec.structs.replace(target, after_apply=fails) if index == 1 else target

    async with running(tmp_path, mode, engines={"engine-0": 2}, retarget=retarget) as job:

        async def fail(index: int) -> None:
            with pytest.raises(UpdateAborted, match=r"version 1 \(ticket 1\).*until a whole version lands"):
                await job.receivers[index].poll_requests(wait_s=PATIENCE_S)

        deliveries, _, _ = await gather(lambda: job.send(1), lambda: fail(0), lambda: fail(1))
        assert await deliveries[0].applied() == {"engine-0": "tainted"}
        for receiver in job.receivers:
            assert receiver.version is None
            with pytest.raises(UpdateAborted, match="tainted"), receiver.step():
                pytest.fail("a step on tainted weights")

        await job.update(2)
        assert job.holds(2)
        for receiver in job.receivers:
            async with receiver.step() as version:
                assert version == 2


@pytest.mark.parametrize("mode", MODES)
async def test_c45_a_version_that_changes_nothing_counts_when_it_is_applied_and_not_before(
    mode: str, tmp_path: Path
) -> None:
    async with running(tmp_path, mode, engines={"engine-0": 2}) as job:
        await job.update(1)
        async with anyio.create_task_group() as tasks:
            for sender in job.senders:
                tasks.start_soon(sender.send_weights, 2)
            await anyio.wait_all_tasks_blocked()
            for receiver in job.receivers:
                assert receiver.version == 1
                async with receiver.step() as version:
                    assert version == 1
            assert [update.version for update in await job.take()] == [2, 2]
        assert [receiver.version for receiver in job.receivers] == [2, 2]
        assert job.holds(1)
