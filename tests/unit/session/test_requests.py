"""Which version serves a request: with it, inside it, and after an update, a retry or a failure."""

from __future__ import annotations

import threading
from pathlib import Path

import anyio.lowlevel
import msgspec
import pytest

import wbridge
from tests.unit.session.job import MODES, PATIENCE_S, gather, running, running_sync, together
from tests.unit.session.test_steps import failing_once
from wbridge import VersionSpan
from wbridge.errors import ConfigError, UpdateAborted

pytestmark = pytest.mark.anyio
ONE = {"engine-0": 1}


@pytest.mark.parametrize("mode", MODES)
async def test_a_request_lists_which_version_computed_how_much_of_it(mode: str, tmp_path: Path) -> None:
    async with running(tmp_path, mode, num_trainers=1, engines=ONE) as job:
        receiver = job.receivers[0]
        early = receiver.request()
        async with early.step(count=4):
            pass
        await job.update(10)
        late = receiver.request()
        for _ in range(3):
            async with receiver.step():
                early.advance()
                late.advance(2)
        await job.update(11)
        async with receiver.step():
            late.advance(5)
        assert (early.version, late.version) == (None, 10)
        assert early.spans == (VersionSpan(None, None, 4), VersionSpan(10, 1, 3))
        assert late.spans == (VersionSpan(10, 1, 6), VersionSpan(11, 2, 5))


async def test_a_request_that_computed_nothing_has_its_snapshot_only(tmp_path: Path) -> None:
    async with running(tmp_path, "async", num_trainers=1, engines=ONE) as job:
        await job.update(1)
        request = job.receivers[0].request()
        request.advance(0)
        await job.update(2)
        assert request.version == 1
        assert request.spans == ()


async def test_two_attempts_at_one_version_are_two_spans(tmp_path: Path) -> None:
    async with running(tmp_path, "async", num_trainers=1, engines=ONE) as job:
        request = job.receivers[0].request()
        for _ in range(2):
            await job.update(7)
            async with request.step():
                pass
        assert request.spans == (VersionSpan(7, 1, 1), VersionSpan(7, 2, 1))


async def test_a_step_that_fails_has_computed_nothing(tmp_path: Path) -> None:
    async with running(tmp_path, "async", num_trainers=1, engines=ONE) as job:
        await job.update(1)
        request = job.receivers[0].request()
        with pytest.raises(RuntimeError, match="out of memory"):
            async with request.step():
                raise RuntimeError("out of memory")
        assert request.spans == ()
        with pytest.raises(ConfigError, match="advance"):
            request.advance(-1)
        async with request.step(), request.step(2):
            pass
        assert request.spans == (VersionSpan(1, 1, 3),)


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_a_request_says_when_the_weights_are_tainted(mode: str, tmp_path: Path) -> None:
    fails = failing_once("cannot repack")

    def retarget(index: int, target: wbridge.Target) -> wbridge.Target:
        return msgspec.structs.replace(target, after_apply=fails)

    async with running(tmp_path, mode, num_trainers=1, engines=ONE, retarget=retarget) as job:
        receiver = job.receivers[0]
        request = receiver.request()

        async def fail() -> None:
            with pytest.raises(UpdateAborted):
                await receiver.poll_requests(wait_s=PATIENCE_S)

        async with request.step(3):
            pass
        await gather(lambda: job.send(1), fail)
        assert request.spans == (VersionSpan(None, None, 3), VersionSpan(None, None, 0))
        with pytest.raises(UpdateAborted, match="tainted"):
            async with request.step():
                pass
        assert receiver.request().version is None
        request.advance(2)  # a server that computes outside of steps is told the truth
        await job.update(2)
        async with request.step():
            pass
        assert [(span.version, span.count) for span in request.spans] == [(None, 3), (None, 2), (2, 1)]


async def test_overlapping_requests_have_the_versions_of_their_steps(tmp_path: Path) -> None:
    async with running(tmp_path, "async", num_trainers=1, engines=ONE) as job:
        receiver = job.receivers[0]
        await job.update(1)

        async def serve(num_passes: int) -> None:
            request = receiver.request()
            seen: list[int | None] = []
            while receiver.version != 4:
                async with request.step() as version:
                    seen.append(version)
                    for _ in range(num_passes):
                        await anyio.lowlevel.checkpoint()
            unrolled = [span.version for span in request.spans for _ in range(span.count)]
            assert unrolled == seen
            assert seen == sorted(seen, key=lambda version: version or 0)

        async with anyio.create_task_group() as tasks:
            for num_passes in range(1, 5):
                tasks.start_soon(serve, num_passes)
            for version in (2, 3, 4):
                await job.update(version)


def test_threads_share_a_request_and_lose_no_unit(tmp_path: Path) -> None:
    with running_sync(tmp_path, "async", num_trainers=1, engines=ONE) as job:
        receiver = job.receivers[0]
        job.update(1)
        request, done = receiver.request(), threading.Event()

        def serve() -> int:
            num_steps = 0
            while not done.is_set():
                with receiver.step():
                    request.advance()
                num_steps += 1
            return num_steps

        def update() -> int:
            try:
                for version in (2, 3):
                    job.update(version)
            finally:
                done.set()
            return 0

        counts = together(serve, serve, update)
        assert sum(span.count for span in request.spans) == sum(counts)
        assert [span.version for span in request.spans] in ([1, 2, 3], [1, 2], [1, 3], [1])


async def test_an_open_request_costs_an_idle_poll_nothing(tmp_path: Path) -> None:
    async with running(tmp_path, "async", num_trainers=1, engines=ONE) as job:
        await job.update(1)
        receiver = job.receivers[0]
        requests = [receiver.request() for _ in range(100)]
        looked = vars(receiver._rollout).keys()
        before = receiver.counters
        for _ in range(50):
            assert await receiver.poll_requests() is None
        assert receiver.counters == before
        assert vars(receiver._rollout).keys() == looked  # nobody keeps a list of requests
        assert all(request.spans == () for request in requests)
