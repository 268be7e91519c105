"""What goes wrong inside one worker: it ends with its reason, or the next version makes it good."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import wbridge
from tests.unit.session.job import MODES, PATIENCE_S, gather, running
from wbridge.engine import mailer
from wbridge.errors import InternalError, PeerLost, UpdateAborted
from wbridge.transport.loopback import LoopbackEndpoint

pytestmark = pytest.mark.anyio
ONE = {"engine-0": 1}


@pytest.mark.parametrize("mode", MODES)
async def test_bytes_that_arrive_changed_abort_the_version(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 1 finds it and cannot decide it: its leader gives the version up for all."""
    async with running(tmp_path, mode, num_trainers=1, engines={"engine-0": 2}, checksum="on") as job:
        await job.update(1)
        wrong = True

        async def corrupt(self: LoopbackEndpoint, target: memoryview, source: memoryview) -> None:
            nonlocal wrong
            target[:] = source
            if wrong and self.peer.endswith("[1]"):
                wrong = False
                target[0] ^= 1

        monkeypatch.setattr(LoopbackEndpoint, "_copy", corrupt)
        outcomes: dict[str, Any] = {}

        async def send() -> None:
            for version in (2, 3):
                delivery = (await job.send(version))[0]
                outcomes[str(version)] = (await delivery.applied())["engine-0"]

        async def roll(index: int) -> None:
            receiver = job.receivers[index]
            with anyio.fail_after(PATIENCE_S):
                while receiver.version != 3:
                    try:
                        await receiver.poll_requests(wait_s=PATIENCE_S)
                    except UpdateAborted:  # direct: some groups were written already
                        assert not mode.endswith("overlap") or mode == "sender_overlap"
                        assert receiver.version is None

        await gather(send, lambda: roll(0), lambda: roll(1))
        assert job.holds(3)
        assert outcomes["2"] in ("aborted", "tainted")
        assert outcomes["3"] == "applied"


async def test_a_task_that_fails_ends_its_worker_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer, and with it the coordinator; the engine that waits for its bytes gives the version up."""
    config = {"checksum": "on", "coordinator_timeout_s": 0.2}
    async with running(tmp_path, "sync", num_trainers=1, engines=ONE, **config) as job:

        def fail(data: memoryview) -> int:
            raise RuntimeError(f"no checksum of {len(data)} bytes")

        monkeypatch.setattr(mailer, "checksum", fail)

        async def send() -> None:
            for version in (1, 2):
                with pytest.raises(InternalError, match=r"trainer/trainer.*no checksum of"):
                    await job.senders[0].send_weights(version)

        async def roll() -> None:
            receiver = job.receivers[0]
            while not receiver._rollout._lockstep.follower.flag:
                await anyio.sleep(0.001)
            assert await receiver.poll_requests() is None

        await gather(send, roll)
        assert job.receivers[0].version is None


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_a_copy_that_fails_taints_the_engine_until_the_next_version(mode: str, tmp_path: Path) -> None:
    async with running(tmp_path, mode, num_trainers=1, engines=ONE) as job:
        await job.update(1)
        receiver = job.receivers[0]
        staging = receiver._rollout._engine._context.staging
        scatter, count = staging._ring.scatter, 0

        def fail_once(*args: Any) -> Any:
            nonlocal count
            count += 1
            if count == 2:
                raise RuntimeError("no memory")
            return scatter(*args)

        staging._ring.scatter = fail_once

        async def roll() -> None:
            with pytest.raises(UpdateAborted, match="failed midway"):
                await receiver.poll_requests(wait_s=PATIENCE_S)
            assert receiver.version is None
            await job.take()

        async def send() -> None:
            delivery = (await job.send(2))[0]
            assert await delivery.applied() == {"engine-0": "tainted"}
            await job.send(3)

        await gather(send, roll)
        assert job.holds(3)


async def test_a_cancelled_hook_lets_the_engine_go(tmp_path: Path) -> None:
    class Slow:
        def __init__(self) -> None:
            self.begun = anyio.Event()
            self.updates: list[wbridge.Update | None] = []
            self.is_slow = True

        async def before_apply(self) -> None:
            self.begun.set()
            if self.is_slow:
                await anyio.sleep_forever()

        async def after_apply(self, update: wbridge.Update | None) -> None:
            self.updates.append(update)

    slow = Slow()
    async with running(tmp_path, "sync", num_trainers=1, engines={"engine-0": 2}, hooks={1: slow}) as job:

        async def cancelled() -> None:
            with anyio.CancelScope() as scope:

                async def cancel() -> None:
                    await slow.begun.wait()
                    slow.is_slow = False
                    scope.cancel()

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(cancel)
                    await job.receivers[1].poll_requests(wait_s=PATIENCE_S)
            assert scope.cancelled_caught
            assert slow.updates == [None]
            await job.take(1)

        await gather(lambda: job.send(1), lambda: job.take(0), cancelled)
        assert job.holds(1)


async def test_close_is_bounded_when_a_put_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that stands still: neither the put nor the flush after it ends."""
    hung = anyio.Event()
    end = anyio.Event()

    async def hang(self: LoopbackEndpoint, target: memoryview, source: memoryview) -> None:
        with anyio.CancelScope(shield=True):
            hung.set()
            await end.wait()

    async with running(tmp_path, "async", num_trainers=1, engines=ONE, close_timeout_s=0.3) as job:
        monkeypatch.setattr(LoopbackEndpoint, "_copy", hang)
        sender = job.senders[0]
        await job.send(1)
        while not hung.is_set():
            await anyio.sleep(0.001)
        with anyio.fail_after(5.0):
            await sender.aclose()
        assert sender._trainer._worker.loop._thread.is_alive()  # cut, so that nothing is freed under the put
        portal = sender._trainer._worker.loop
        portal._loop.call_soon_threadsafe(end.set)
        portal._thread.join(5.0)
        assert not portal._thread.is_alive()


async def test_a_cancelled_block_still_leaves_the_job(tmp_path: Path) -> None:
    async with running(tmp_path, "sync", engines={"engine-0": 2}) as job:
        with anyio.CancelScope() as scope:
            async with job.receivers[1]:
                scope.cancel()
                await anyio.sleep_forever()
        assert scope.cancelled_caught
        assert not job.receivers[1]._rollout._worker.loop._thread.is_alive()
        with pytest.raises(PeerLost, match="worker 1 is lost"):
            await job.receivers[0].poll_requests(wait_s=PATIENCE_S)


async def test_a_writer_survives_a_receiver_that_only_it_finds_lost(tmp_path: Path) -> None:
    """Its endpoint breaks; the coordinator, which still hears the engine, goes on granting to it."""
    engines = {"engine-0": 1, "engine-1": 1}
    async with running(tmp_path, "async", num_trainers=1, engines=engines) as job:
        await job.update(1)
        mailers = job.senders[0]._trainer._epoch.engine._puts._mailers
        broken = mailers["rollout/engine-1[0]"]

        async def break_off(*_: object) -> None:
            raise PeerLost("rollout/engine-1[0] is gone")

        broken._endpoint.put = break_off
        for version in (2, 3):
            delivery = (await job.send(version))[0]
            await job.take(0)
            assert job.rollouts[0].holds(version)
            while delivery.outcomes.get("engine-0") != "applied":  # told after the poll that took it
                await anyio.sleep(0.001)
            assert "engine-1" not in delivery.outcomes
            await delivery.abort()


async def test_a_lost_receiver_that_answers_no_flush_frees_the_source(tmp_path: Path) -> None:
    """Closing its endpoint takes bounded time and proves as much; the live weights are not kept for it."""
    engines = {"engine-0": 1, "engine-1": 1}
    async with running(tmp_path, "receiver_overlap", num_trainers=1, engines=engines) as job:
        endpoint = job.senders[0]._trainer._epoch.engine._puts._mailers["rollout/engine-1[0]"]._endpoint

        async def hang(*_: object) -> None:
            await anyio.sleep_forever()

        async def close() -> None:
            return

        endpoint.put, endpoint.flush, endpoint.aclose = hang, hang, close
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(job.send, 1)
            await job.take(0)
            await job.receivers[1].aclose()
        assert job.rollouts[0].holds(1)
