"""Memberships that change while weights flow: trainers that come back, engines that come late or break."""

from __future__ import annotations

import threading
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

import wbridge
from tests.models.toy import Rollout, Trainer
from tests.unit.session.job import (
    MODES,
    PATIENCE_S,
    Job,
    gather,
    poll_until_lost,
    rendezvous,
    running,
    settings,
)

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("mode", MODES)
async def test_rollouts_follow_trainers_that_start_again(mode: str, tmp_path: Path) -> None:
    """The coordinator dies with rank 0; the next one starts at a lower version, and all engines follow."""
    async with running(tmp_path, mode) as job:
        await job.update(7)
        old = job.receivers[0].epoch
        await gather(*[sender.aclose for sender in job.senders])
        for receiver in job.receivers:
            assert await receiver.poll_requests() is None
        assert [receiver.version for receiver in job.receivers] == [7, 7, 7]

        async with AsyncExitStack() as stack:
            trainers = [Trainer(rank, 2) for rank in range(2)]
            senders = [
                await stack.enter_async_context(
                    wbridge.SenderAdapter(t.source, rendezvous=rendezvous(tmp_path), config=settings(mode, 2))
                )
                for t in trainers
            ]
            await gather(*[sender.connect for sender in senders])
            again = Job(trainers, job.rollouts, senders, job.receivers)
            for version in (3, 4):
                _, updates = await again.update(version)
                assert again.holds(version)
            new = senders[0].epoch
            assert {update.epoch for update in updates} == {new}
            assert old is not None and new is not None and old.incarnation != new.incarnation


@pytest.mark.parametrize("modes", [("sync", "async"), ("async", "sync")])
async def test_an_engine_follows_a_trainer_that_comes_back_with_another_mode(
    modes: tuple[str, str], tmp_path: Path
) -> None:
    trainer, rollout = Trainer(), Rollout("engine-0")
    receiver = wbridge.ReceiverAdapter(
        rollout.target,
        rendezvous=rendezvous(tmp_path),
        config={"transport": "loopback", "connect_timeout_s": PATIENCE_S},  # the mode is the coordinator's
    )

    async def take(version: int) -> None:
        update = await receiver.poll_requests(wait_s=PATIENCE_S)
        assert update is not None
        assert (update.version, rollout.holds(version)) == (version, True)

    async with receiver:
        for version, mode in enumerate(modes, 1):
            async with wbridge.SenderAdapter(
                trainer.source, rendezvous=rendezvous(tmp_path), config=settings(mode, 1)
            ) as sender:
                connects = [sender.connect] if receiver.epoch else [sender.connect, receiver.connect]
                await gather(*connects)
                trainer.set_version(version)
                await gather(lambda v=version, s=sender: s.send_weights(v), lambda v=version: take(v))


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_an_engine_that_comes_late_joins_in_the_next_epoch(mode: str, tmp_path: Path) -> None:
    async with running(tmp_path, mode, engines={"engine-0": 2}) as job:
        await job.update(1)
        late = Rollout("engine-1")
        receiver = wbridge.ReceiverAdapter(
            late.target, rendezvous=rendezvous(tmp_path), config=settings(mode, 1)
        )
        async with receiver:
            await receiver.connect()
            assert receiver.version is None
            job.rollouts.append(late)
            job.receivers.append(receiver)
            for version in (2, 3):
                deliveries, _ = await job.update(version)
                assert job.holds(version)
                assert await deliveries[0].applied() == {"engine-0": "applied", "engine-1": "applied"}


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_c59_an_engine_that_comes_and_goes_ten_times_costs_the_others_no_version(
    mode: str, tmp_path: Path
) -> None:
    """How often it is started again is its operator's to say; what it costs the others is not."""
    async with running(tmp_path, mode, engines={"engine-0": 2}) as job:
        threads = threading.active_count()
        for attempt in range(10):
            restless = Rollout("engine-1")
            receiver = wbridge.ReceiverAdapter(
                restless.target, rendezvous=rendezvous(tmp_path), config=settings(mode, 1)
            )
            async with receiver:
                await receiver.connect()
                both = Job(job.trainers, [*job.rollouts, restless], job.senders, [*job.receivers, receiver])
                await both.update(2 * attempt + 1)
                assert both.holds(2 * attempt + 1)
            deliveries, _ = await job.update(2 * attempt + 2)
            assert job.holds(2 * attempt + 2)
            assert (await deliveries[0].applied())["engine-0"] == "applied"
        live = [name for name, engine in job.senders[0].engines.items() if engine.live]
        assert (live, threading.active_count()) == (["engine-0"], threads)


@pytest.mark.parametrize("lost", [0, 2])
async def test_a_worker_lost_while_bytes_are_due_ends_the_polls_of_its_engine(
    lost: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Direct slots: nobody is left to tell the survivors that the bytes will not come. Only a worker that was
    told before, since the abort that the goodbye causes was faster than the loss, knows that it is whole."""
    async with running(tmp_path, "sync", num_trainers=1, engines={"engine-0": 4}) as job:
        engine = job.senders[0]._trainer._epoch.engine
        monkeypatch.setattr(engine, "credit", lambda *_: None)  # so no byte comes
        survivors = [index for index in range(4) if index != lost]

        async def send() -> None:
            await job.senders[0].send_weights(1)

        async def roll(index: int) -> None:
            rollout, told = job.receivers[index]._rollout, list[str]()
            leave = rollout._leave
            monkeypatch.setattr(
                rollout, "_leave", lambda left, *more: told.append(left.outcome) or leave(left, *more)
            )
            assert "is lost" in str(await poll_until_lost(job.receivers[index]))
            if told:
                assert told == ["aborted"]
                with job.receivers[index].step() as version:
                    assert version is None
            else:
                with pytest.raises(wbridge.UpdateAborted, match="tainted"), job.receivers[index].step():
                    pass

        async def leave() -> None:
            receiver = job.receivers[lost]

            async def poll() -> None:
                with pytest.raises(wbridge.EndpointClosed):
                    await receiver.poll_requests(wait_s=PATIENCE_S)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(poll)
                while receiver._rollout._lockstep.follower._stage != "applying":
                    await anyio.sleep(0.001)
                await receiver.aclose()
            ending = receiver._rollout._worker._running.finished.exception()
            assert isinstance(ending, wbridge.EndpointClosed)  # cancelled, and nothing went wrong in it

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send)
            tasks.start_soon(leave)
            for index in survivors:
                tasks.start_soon(roll, index)
