"""Hooks on an engine of two workers: their order, and what an error, a cancellation or a long wait does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch

import wbridge
from tests.unit.session.job import PATIENCE_S, Job, gather, running, running_sync, together
from wbridge.errors import EndpointClosed, LayoutError, PeerLost

pytestmark = pytest.mark.anyio
PAIR = {"engine-0": 2}
TWO_MODES = ("sync", "async")
"""One in which workers park for the grant, one in which they park for the commit."""


class Hooks:
    """Writes down what ran. `before` and `after` are done once, by the next call."""

    def __init__(self) -> None:
        self.calls: list[object] = []
        self.before: Callable[[], Any] | None = None  # Any: None, or something to await
        self.after: Callable[[], Any] | None = None  # Any: as above

    def before_apply(self) -> Any:  # Any: as above
        self.calls.append("before")
        action, self.before = self.before, None
        return action() if action else None

    def after_apply(self, update: wbridge.Update | None) -> Any:  # Any: as above
        self.calls.append(update.version if update else None)
        action, self.after = self.after, None
        return action() if action else None


class AsyncHooks(Hooks):
    async def before_apply(self) -> None:
        await anyio.lowlevel.checkpoint()
        awaitable = super().before_apply()
        if awaitable is not None:
            await awaitable

    async def after_apply(self, update: wbridge.Update | None) -> None:
        await anyio.lowlevel.checkpoint()
        awaitable = super().after_apply(update)
        if awaitable is not None:
            await awaitable


def fail(message: str) -> Callable[[], None]:
    def raise_error() -> None:
        raise RuntimeError(message)

    return raise_error


def is_paired(calls: list[object]) -> bool:
    """Whether each `before_apply` was followed by its `after_apply`."""
    return calls[::2] == ["before"] * (len(calls) // 2) and "before" not in calls[1::2]


async def take(job: Job, version: int, errors: dict[int, list[str]] | None = None) -> None:
    """Poll on all workers until they have `version`; `errors` collects what polls raised meanwhile."""

    async def poll(index: int) -> None:
        while job.receivers[index].version != version:
            try:
                await job.receivers[index].poll_requests(wait_s=0.2)
            except RuntimeError as exc:
                assert errors is not None
                errors.setdefault(index, []).append(str(exc))

    await gather(*[lambda i=i: poll(i) for i in range(len(job.receivers))])  # type: ignore[misc]  # a lambda with a default


@pytest.mark.parametrize("refusing", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("kind", [Hooks, AsyncHooks])
@pytest.mark.parametrize("mode", TWO_MODES)
async def test_a_refusal_releases_all_workers_and_the_next_poll_applies(
    mode: str, kind: type[Hooks], refusing: tuple[int, ...], tmp_path: Path
) -> None:
    hooks = {index: kind() for index in range(2)}
    async with running(tmp_path, mode, engines=PAIR, hooks=hooks) as job:
        await job.update(1)
        errors: dict[int, list[str]] = {}

        for index in refusing:
            hooks[index].before = fail(f"cache of {index} is busy")
        for other in hooks.values():
            other.after = lambda: _check_old(job)  # whoever is released sees the old version
        await gather(lambda: job.send(2), lambda: take(job, 2, errors))

        assert set(errors) <= set(refusing)
        for index, texts in errors.items():
            assert texts == [f"cache of {index} is busy"]
        assert errors or mode == "sync"
        assert job.holds(2)
        for index, hook in hooks.items():
            assert is_paired(hook.calls)
            assert hook.calls[:2] == ["before", 1]
            assert hook.calls[-2:] == ["before", 2]
            assert (None in hook.calls) or index not in errors


def _check_old(job: Job) -> None:
    if any(receiver.version != 1 for receiver in job.receivers):
        return  # this one runs after the update
    assert job.holds(1) or job.holds(2)


@pytest.mark.parametrize("failing", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("kind", [Hooks, AsyncHooks])
@pytest.mark.parametrize("mode", TWO_MODES)
async def test_an_error_after_the_apply_is_raised_by_that_poll_and_the_version_stays(
    mode: str, kind: type[Hooks], failing: tuple[int, ...], tmp_path: Path
) -> None:
    hooks = {index: kind() for index in range(2)}
    async with running(tmp_path, mode, engines=PAIR, hooks=hooks) as job:
        for index in failing:
            hooks[index].after = fail("cannot resume")
        errors: dict[int, list[str]] = {}
        deliveries, _ = await gather(lambda: job.send(1), lambda: take(job, 1, errors))
        assert errors == {index: ["cannot resume"] for index in failing}
        assert await deliveries[0].applied() == {"engine-0": "applied"}  # type: ignore[index]  # deliveries
        assert job.holds(1)
        assert all(hook.calls == ["before", 1] for hook in hooks.values())
        await job.update(2)
        assert job.holds(2)


@pytest.mark.parametrize("cancelled", [0, 1])
@pytest.mark.parametrize("mode", TWO_MODES)
async def test_a_cancelled_hook_before_the_apply_releases_all_workers(
    mode: str, cancelled: int, tmp_path: Path
) -> None:
    hooks = {index: AsyncHooks() for index in range(2)}
    async with running(tmp_path, mode, engines=PAIR, hooks=hooks) as job:
        await job.update(1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(job.send, 2)
            scope, waits = anyio.CancelScope(), anyio.Event()

            async def wait() -> None:
                waits.set()
                await anyio.sleep_forever()

            async def poll() -> None:
                with scope:
                    await job.receivers[cancelled].poll_requests(wait_s=PATIENCE_S)
                assert scope.cancelled_caught
                await take_own()

            async def take_own() -> None:
                while job.receivers[cancelled].version != 2:
                    await job.receivers[cancelled].poll_requests(wait_s=0.2)

            async def cancel() -> None:
                await waits.wait()
                scope.cancel()

            async def other() -> None:
                while job.receivers[1 - cancelled].version != 2:
                    await job.receivers[1 - cancelled].poll_requests(wait_s=0.2)

            hooks[cancelled].before = wait
            await gather(poll, cancel, other)
        assert job.holds(2)
        assert hooks[cancelled].calls[:4] == ["before", 1, "before", None]
        assert all(is_paired(hook.calls) and hook.calls[-2:] == ["before", 2] for hook in hooks.values())


@pytest.mark.parametrize("mode", TWO_MODES)
async def test_a_cancelled_hook_after_the_apply_changes_nothing_of_it(mode: str, tmp_path: Path) -> None:
    hooks = {index: AsyncHooks() for index in range(2)}
    async with running(tmp_path, mode, engines=PAIR, hooks=hooks) as job:
        scope = anyio.CancelScope()

        async def resume() -> None:
            scope.cancel()
            await anyio.sleep_forever()

        async def poll() -> None:
            with scope:
                await job.receivers[1].poll_requests(wait_s=PATIENCE_S)
            assert scope.cancelled_caught

        hooks[1].after = resume
        deliveries, *_ = await gather(lambda: job.send(1), poll, lambda: job.take(0))
        assert await deliveries[0].applied() == {"engine-0": "applied"}  # type: ignore[index]  # deliveries
        assert [receiver.version for receiver in job.receivers] == [1, 1]
        await job.update(2)
        assert job.holds(2)


@pytest.mark.parametrize("refuses_late", [False, True])
@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("mode", TWO_MODES)
async def test_c51_a_hook_that_takes_longer_than_the_hold_holds_nobody_else(
    mode: str, slow: int, refuses_late: bool, tmp_path: Path
) -> None:
    """The other worker goes on after `hold_timeout_s`; what the slow one says then counts for nothing."""
    hooks = {index: AsyncHooks() for index in range(2)}
    async with running(tmp_path, mode, engines=PAIR, hooks=hooks, hold_timeout_s=0.1) as job:
        await job.update(1)
        is_released, errors = anyio.Event(), dict[int, list[str]]()

        async def wait() -> None:
            await is_released.wait()
            if refuses_late:
                raise RuntimeError("no longer ready")

        async def watch() -> None:
            while None not in hooks[1 - slow].calls:
                await anyio.sleep(0.001)
            assert job.receivers[1 - slow].version == 1
            is_released.set()

        hooks[slow].before = wait
        await gather(lambda: job.send(2), watch, lambda: take(job, 2, errors))
        assert errors == ({slow: ["no longer ready"]} if refuses_late else {})
        assert job.holds(2)
        assert all(is_paired(hook.calls) and hook.calls[-2:] == ["before", 2] for hook in hooks.values())


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("mode", TWO_MODES)
def test_a_blocking_hook_that_takes_longer_than_the_hold_holds_nobody_else(
    mode: str, slow: int, tmp_path: Path
) -> None:
    hooks = {index: Hooks() for index in range(2)}
    with running_sync(tmp_path, mode, engines=PAIR, hooks=hooks, hold_timeout_s=0.1) as job:
        job.update(1)
        for trainer in job.trainers:
            trainer.set_version(2)
        is_released = threading.Event()
        hooks[slow].before = lambda: is_released.wait(PATIENCE_S)
        hooks[1 - slow].after = is_released.set

        def poll(index: int) -> None:
            while job.receivers[index].version != 2:
                job.receivers[index].poll_requests(wait_s=0.2)

        together(
            *[lambda s=s: s.send_weights(2) for s in job.senders],  # type: ignore[misc]  # a lambda with a default
            lambda: poll(0),
            lambda: poll(1),
        )
        assert job.holds(2)
        assert hooks[1 - slow].calls[:4] == ["before", 1, "before", None]
        assert all(is_paired(hook.calls) and hook.calls[-2:] == ["before", 2] for hook in hooks.values())


@pytest.mark.parametrize("early", [0, 1])
@pytest.mark.parametrize("mode", TWO_MODES)
async def test_c51_pause_and_update_may_reach_the_workers_in_any_order(
    mode: str, early: int, tmp_path: Path
) -> None:
    """One worker meets the update while the other is paused: it waits no longer than the hold, then both
    apply at the same poll."""
    hooks = {index: Hooks() for index in range(2)}
    async with running(tmp_path, mode, engines=PAIR, hooks=hooks, hold_timeout_s=0.1) as job:
        await job.update(1)

        async def meet_alone() -> None:
            while None not in hooks[early].calls:  # it parks again and again, and is let go
                assert await job.receivers[early].poll_requests(wait_s=0.5) is None
                await job.receivers[1 - early].poll_requests()  # the other one polls, but never stays
            await take(job, 2)

        await gather(lambda: job.send(2), meet_alone)
        assert job.holds(2)
        assert all(is_paired(hook.calls) for hook in hooks.values())


@pytest.mark.parametrize("steps_are_open", [False, True])
@pytest.mark.parametrize("mode", TWO_MODES)
async def test_an_adapter_that_a_hook_closes_resumes_with_its_old_version(
    mode: str, steps_are_open: bool, tmp_path: Path
) -> None:
    hooks = AsyncHooks()
    one = {"engine-0": 1}
    async with running(tmp_path, mode, num_trainers=1, engines=one, hooks={0: hooks}) as job:
        await job.update(1)
        receiver = job.receivers[0]
        hooks.calls.clear()
        hooks.before = receiver.aclose

        async def take() -> None:
            with pytest.raises(EndpointClosed):
                await receiver.poll_requests(wait_s=PATIENCE_S)

        async def send() -> None:
            await job.send(2)

        async with AsyncExitStack() as stack:
            if steps_are_open:
                await stack.enter_async_context(receiver.step())
            await gather(take, send)
        assert hooks.calls == ["before", None]
        async with receiver.step() as version:
            assert version == 1


async def test_what_fails_after_a_refusal_is_raised_because_of_it(tmp_path: Path) -> None:
    hooks = Hooks()
    async with running(tmp_path, "async", num_trainers=1, engines={"engine-0": 1}, hooks={0: hooks}) as job:
        hooks.before, hooks.after = fail("busy"), fail("cannot resume")
        await job.send(1)
        with pytest.raises(RuntimeError, match="cannot resume") as raised:
            await job.receivers[0].poll_requests(wait_s=PATIENCE_S)
        assert str(raised.value.__cause__) == "busy"
        assert job.receivers[0].version is None
        await job.take()
        assert job.holds(1)


@pytest.mark.parametrize("mode", TWO_MODES)
async def test_a_worker_that_is_lost_while_another_has_paused_lets_it_resume(
    mode: str, tmp_path: Path
) -> None:
    hooks = {index: Hooks() for index in range(2)}
    async with running(tmp_path, mode, num_trainers=1, engines=PAIR, hooks=hooks) as job:
        asked = anyio.Event()
        hooks[0].before = asked.set

        # Its next poll, which never comes, is then the one at which they meet.
        assert await job.receivers[1].poll_requests() is None

        async def lose() -> None:
            await asked.wait()
            await job.receivers[1].aclose()

        async def poll() -> None:
            while True:
                await job.receivers[0].poll_requests(wait_s=0.2)

        async def poll_until_lost() -> None:
            with pytest.raises(PeerLost):
                await poll()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_send, job)
            await gather(poll_until_lost, lose)
            tasks.cancel_scope.cancel()
        assert is_paired(hooks[0].calls)
        assert hooks[0].calls[-1] is None


async def _send(job: Job) -> None:
    await job.senders[0].send_weights(1)


async def test_parameters_that_have_moved_are_found_before_any_hook_runs(tmp_path: Path) -> None:
    hooks = Hooks()
    async with running(tmp_path, "async", num_trainers=1, engines={"engine-0": 1}, hooks={0: hooks}) as job:
        moved = job.rollouts[0].parameters["norm"]
        job.rollouts[0].parameters["norm"] = torch.empty_like(moved)
        await job.send(1)
        with pytest.raises(LayoutError, match="norm"):
            await job.receivers[0].poll_requests(wait_s=PATIENCE_S)
        assert hooks.calls == []
        job.rollouts[0].parameters["norm"] = moved
        await job.take()
        assert hooks.calls == ["before", 1]


class Server:
    """An inference server with a prefix cache; its hooks do what such a server must, in this order."""

    def __init__(self) -> None:
        self.rollout: Any = None  # Any: a toy rollout, set when the job is there
        self.log: list[str] = []
        self.cache: dict[tuple[str, object], float] = {}

    def before_apply(self) -> None:
        self.log.append("pause")

    def after_apply(self, update: wbridge.Update | None) -> None:
        assert update is not None and self.rollout.holds(update.version)
        self.log.append(f"applied {update.version}")
        self.cache = {key: value for key, value in self.cache.items() if key[1] is not None}
        self.log.append("invalidate")
        self.log.append("resume")

    def answer(self, prompt: str, salt: object = None) -> float:
        """A number that depends on the weights, from the cache if the prompt was seen."""
        return self.cache.setdefault((prompt, salt), float(self.rollout.parameters["scale"]))


@pytest.mark.parametrize("salted", [False, True])
async def test_c50_what_older_weights_have_cached_serves_no_newer_request(
    salted: bool, tmp_path: Path
) -> None:
    """By the order pause, apply, invalidate, resume; or by a salt that is the version."""
    server = Server()
    async with running(tmp_path, "async", num_trainers=1, engines={"engine-0": 1}, hooks={0: server}) as job:
        server.rollout = job.rollouts[0]
        answers = []
        for version in (1, 2, 3):
            await job.update(version)
            request = job.receivers[0].request()
            for _ in range(2):
                async with request.step():
                    answers.append(server.answer("shared prefix", request.version if salted else None))
        expected = [float(job.rollouts[0].expected(version)["scale"]) for version in (1, 2, 3)]
        assert answers == [value for value in expected for _ in range(2)]
        assert server.log == [
            line for v in (1, 2, 3) for line in ("pause", f"applied {v}", "invalidate", "resume")
        ]


@pytest.mark.parametrize("mode", TWO_MODES)
async def test_c43_an_update_ends_no_running_request(mode: str, tmp_path: Path) -> None:
    """Requests that run across updates are neither aborted nor begun anew: they know what served them."""
    async with running(tmp_path, mode, num_trainers=1, engines={"engine-0": 1}) as job:
        receiver = job.receivers[0]
        await job.update(1)
        finished = []

        async def serve(num_tokens: int) -> None:
            request = receiver.request()
            while sum(s.count for s in request.spans) < num_tokens or request.spans[-1].version != 3:
                async with request.step():
                    await anyio.lowlevel.checkpoint()
                await anyio.sleep(0.001)
            finished.append(request)

        async with anyio.create_task_group() as tasks:
            for num_tokens in range(1, 17):
                tasks.start_soon(serve, num_tokens)
            for version in (2, 3):
                await job.update(version)
        assert len(finished) == 16
        assert all(request.version == request.spans[0].version == 1 for request in finished)
