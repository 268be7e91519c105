"""What a cancelled call leaves behind."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import anyio.lowlevel
import msgspec
import pytest

import wbridge
from tests.models.toy import Rollout, Trainer
from tests.unit.session.job import MODES, gather, rendezvous, running, settings
from wbridge.errors import UpdateAborted
from wbridge.session.sending import SendingEpoch

pytestmark = pytest.mark.anyio
ONE = {"engine-0": 1}


@pytest.mark.parametrize("mode", ["sync", "receiver_overlap"])
async def test_a_send_cancelled_before_all_ranks_called_is_withdrawn(mode: str, tmp_path: Path) -> None:
    async with running(tmp_path, mode, engines=ONE) as job:
        with anyio.move_on_after(0.02) as scope:
            await job.senders[0].send_weights(1)
        assert scope.cancelled_caught
        with pytest.raises(UpdateAborted, match="version 1: trainer rank 0 cancelled send 1"):
            await job.senders[1].send_weights(1)

        await job.update(1)
        assert job.holds(1)


@pytest.mark.parametrize("mode", ["sync", "receiver_overlap"])
async def test_a_send_cancelled_after_the_announcement_aborts_the_version(mode: str, tmp_path: Path) -> None:
    """Direct staging: engine-0 stands ready, engine-1 does not come."""
    engines = {"engine-0": 1, "engine-1": 1}
    async with running(tmp_path, mode, engines=engines) as job:
        await job.update(1)
        for trainer in job.trainers:
            trainer.set_version(2)
        scope = anyio.CancelScope()

        async def send_and_cancel() -> None:
            with scope:
                await job.senders[0].send_weights(2)

        async def fail() -> None:
            with pytest.raises(UpdateAborted, match="version 2: trainer rank 0 cancelled send 2"):
                await job.senders[1].send_weights(2)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send_and_cancel)
            tasks.start_soon(fail)
            follower = job.receivers[0]._rollout._lockstep.follower
            while not (follower.flag or mode == "receiver_overlap"):
                await anyio.sleep(0.001)  # until the announcement has reached the engine
            scope.cancel()
        assert scope.cancelled_caught
        assert [receiver.version for receiver in job.receivers] == [1, 1]
        for trainer in job.trainers:
            trainer.set_version(99)  # nobody reads them any more

        await job.update(2)
        assert job.holds(2)


async def test_a_send_cancelled_when_all_engines_are_through_returns_with_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator has forgotten the version by then: its answer is that it was announced."""
    free = SendingEpoch._source_free
    held: list[Callable[[], None]] = []
    monkeypatch.setattr(
        SendingEpoch, "_source_free", lambda *call: held.append(functools.partial(free, *call))
    )
    async with running(tmp_path, "sync", num_trainers=1, engines=ONE) as job:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(job.send, 1)
            await job.take()
            while not held:
                await anyio.sleep(0.001)
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.1)  # the send is withdrawn, in vain
            job.senders[0]._trainer._worker.loop.submit(run(held.pop()))
        await job.receivers[0].aclose()


def run(call: Callable[[], None]) -> Callable[[], Awaitable[None]]:
    async def work() -> None:
        call()

    return work


async def test_a_cancelled_wait_for_a_snapshot_withdraws_only_that_call(tmp_path: Path) -> None:
    async with running(tmp_path, "async", engines=ONE, snapshot_versions=1) as job:
        first = (await job.send(1))[0]
        with anyio.move_on_after(0.02) as scope:
            await job.senders[0].send_weights(2)
        assert scope.cancelled_caught
        with pytest.raises(UpdateAborted, match="trainer rank 0 cancelled send 2"):
            await (await job.senders[1].send_weights(2)).landed()
        await job.take()
        assert await first.applied() == {"engine-0": "applied"}
        assert job.holds(1)

        await job.update(3)
        assert job.holds(3)


async def test_waiting_for_a_delivery_can_be_given_up(tmp_path: Path) -> None:
    async with running(tmp_path, "async", engines=ONE) as job:
        delivery = (await job.send(1))[0]
        with anyio.move_on_after(0.02) as scope:
            await delivery.applied()
        assert scope.cancelled_caught
        await job.take()
        assert await delivery.applied() == {"engine-0": "applied"}


@pytest.mark.parametrize("mode", MODES)
async def test_a_cancelled_parked_poll_lets_its_engine_go(mode: str, tmp_path: Path) -> None:
    async with running(tmp_path, mode, engines={"engine-0": 2}) as job:

        async def train() -> None:
            await job.send(1)

        async def roll() -> None:
            with anyio.move_on_after(0.1) as scope:
                await job.receivers[0].poll_requests(wait_s=10.0)  # worker 1 does not come
            assert scope.cancelled_caught
            assert [receiver.version for receiver in job.receivers] == [None, None]
            await job.take()

        await gather(train, roll)
        assert job.holds(1)


@pytest.mark.parametrize("mode", MODES)
async def test_a_cancellation_after_the_decision_comes_after_the_update(mode: str, tmp_path: Path) -> None:
    scope = anyio.CancelScope()

    def retarget(_: int, target: wbridge.Target) -> wbridge.Target:
        return msgspec.structs.replace(target, after_apply=scope.cancel)

    async with running(tmp_path, mode, num_trainers=1, engines=ONE, retarget=retarget) as job:

        async def roll() -> None:
            with scope:
                await job.take()

        await gather(lambda: job.send(1), roll)
        assert scope.cancelled_caught
        assert job.receivers[0].version == 1
        assert job.holds(1)


async def test_a_cancelled_connect_leaves_nothing_behind(tmp_path: Path) -> None:
    values = settings("sync", 1)
    sender = wbridge.SenderAdapter(Trainer().source, rendezvous=rendezvous(tmp_path), config=values)
    receiver = wbridge.ReceiverAdapter(
        Rollout("engine-0", 0, 2).target, rendezvous=rendezvous(tmp_path), config=values
    )
    with anyio.move_on_after(0.1) as scope:
        await gather(sender.connect, receiver.connect)
    assert scope.cancelled_caught
    await gather(sender.aclose, receiver.aclose)
    assert not (tmp_path / "rendezvous").exists()
