"""Who gets which version: `every` and `latest`, outcomes, aborts, labels that repeat or go down."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import anyio
import pytest

import wbridge.sync
from tests.unit.session.job import MODES, gather, running
from tests.unit.session.virtual import virtual
from wbridge.errors import BarrierTimeout, UpdateAborted
from wbridge.flow.messages import TicketAborted
from wbridge.testing.streams import LoopDevice

pytestmark = pytest.mark.anyio
TWO = {"engine-0": 1, "engine-1": 1}


async def test_every_waits_for_a_slow_engine(tmp_path: Path) -> None:
    async with running(tmp_path, "sync", engines=TWO, relay_patience_s=0.01) as job:
        sent = anyio.Event()

        async def send() -> None:
            await job.send(1)
            sent.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send)
            await job.take(0)
            assert job.receivers[0].version == 1
            assert not sent.is_set()
            await job.take(1)
            await sent.wait()
        assert job.holds(1)


@virtual
async def test_every_raises_after_its_deadline_and_names_the_engine(tmp_path: Path) -> None:
    devices = (LoopDevice(), LoopDevice())
    limits = {"relay_patience_s": 0.01, "update_timeout_s": 1.0}
    async with running(tmp_path, "sync", engines=TWO, devices=devices, **limits) as job:
        errors: list[BarrierTimeout] = []

        async def send(index: int) -> None:
            with pytest.raises(BarrierTimeout, match=r"version 1 \(ticket 1\).*engine-1") as caught:
                await job.senders[index].send_weights(1)
            errors.append(caught.value)

        for trainer in job.trainers:
            trainer.set_version(1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send, 0)
            tasks.start_soon(send, 1)
            await job.take(0)
        assert [error.missing for error in errors] == [("engine-1",)] * 2
        assert (job.receivers[0].version, job.receivers[1].version) == (1, None)
        assert job.rollouts[0].holds(1)

        await job.update(2)  # nobody is left behind for good
        assert job.holds(2)


async def test_latest_lets_a_slow_engine_skip_versions(tmp_path: Path) -> None:
    async with running(tmp_path, "async", engines=TWO, relay_patience_s=0.01) as job:
        first = (await job.send(1))[0]
        assert await first.landed() == {"engine-0": "landed", "engine-1": "landed"}
        await job.take(0)
        second = (await job.send(2))[0]
        await job.take(0)
        assert await second.applied() == {"engine-0": "applied", "engine-1": "missed"}
        third = (await job.send(3))[0]
        await job.take(0)
        assert job.rollouts[0].holds(3)
        assert await third.applied() == {"engine-0": "applied", "engine-1": "missed"}

        taken = [(await job.take(1))[0].version, (await job.take(1))[0].version]
        assert taken == [1, 3]
        assert job.holds(3)
        assert await first.applied() == {"engine-0": "applied", "engine-1": "applied"}
        assert second.outcomes == {"engine-0": "applied", "engine-1": "missed"}


async def test_latest_supersedes_what_nobody_has_begun_to_take(tmp_path: Path) -> None:
    async with running(tmp_path, "async", engines=TWO) as job:
        await (await job.send(1))[0].landed()
        second = (await job.send(2))[0]  # waits for both engines, which still hold version 1
        third = (await job.send(3))[0]
        assert await second.applied() == {"engine-0": "superseded", "engine-1": "superseded"}
        assert await second.landed() == second.outcomes
        await job.take()
        await job.take()
        assert job.holds(3)
        assert await third.applied() == {"engine-0": "applied", "engine-1": "applied"}


async def test_an_engine_that_left_is_lost_and_nobody_waits_for_it(tmp_path: Path) -> None:
    async with running(tmp_path, "sync", engines=TWO) as job:
        await job.update(1)
        await job.receivers[1].aclose()
        deliveries, _ = await gather(lambda: job.send(2), lambda: job.take(0))
        assert await deliveries[0].applied() == {"engine-0": "applied", "engine-1": "lost"}
        assert job.rollouts[0].holds(2)


async def test_an_abort_reaches_engines_that_have_landed_but_not_applied(tmp_path: Path) -> None:
    async with running(tmp_path, "async", engines=TWO) as job:
        await job.update(1)
        deliveries = await job.send(2)
        await deliveries[0].landed()
        await deliveries[1].abort()
        for delivery in deliveries:
            with pytest.raises(UpdateAborted, match="trainer rank 1 aborted it"):
                await delivery.applied()
        assert await job.receivers[0].poll_requests() is None
        assert [receiver.version for receiver in job.receivers] == [1, 1]
        assert job.holds(1)

        await job.update(2)  # the same version again: another ticket
        assert job.holds(2)
        assert deliveries[0].outcomes == {"engine-0": "aborted", "engine-1": "aborted"}


async def test_an_abort_waits_for_the_answers_of_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a poll right behind it could still apply the version."""
    async with running(tmp_path, "async", engines={"engine-0": 1}) as job:
        await job.update(1)
        deliveries = await job.send(2)
        await deliveries[0].landed()
        rollout, kept = job.receivers[0]._rollout, []
        receive = rollout.receive

        def keep_abort(message: object) -> None:
            if isinstance(message, TicketAborted):
                kept.append(message)
            else:
                receive(message)

        monkeypatch.setattr(rollout, "receive", keep_abort)
        with anyio.move_on_after(0.1) as waiting:
            await deliveries[0].abort()
        assert waiting.cancelled_caught
        rollout._worker.loop.call(partial(receive, kept[0]))
        await deliveries[0].abort()
        assert await job.receivers[0].poll_requests() is None
        assert deliveries[0].outcomes == {"engine-0": "aborted"}


async def test_an_abort_does_not_undo_an_applied_version(tmp_path: Path) -> None:
    async with running(tmp_path, "async", engines=TWO) as job:
        deliveries, _ = await job.update(1)
        await deliveries[0].applied()
        await deliveries[0].abort()
        await deliveries[0].abort()
        assert deliveries[0].outcomes == {"engine-0": "applied", "engine-1": "applied"}
        assert [receiver.version for receiver in job.receivers] == [1, 1]
        await job.update(2)
        assert job.holds(2)


async def test_an_abort_before_all_ranks_have_called_withdraws_the_call(tmp_path: Path) -> None:
    async with running(tmp_path, "async", engines={"engine-0": 1}) as job:
        early = await job.senders[0].send_weights(1)
        assert early.ticket is None
        await early.abort()
        with pytest.raises(UpdateAborted, match="trainer rank 0 cancelled"):
            await (await job.senders[1].send_weights(1)).landed()
        with pytest.raises(UpdateAborted, match="trainer rank 0 cancelled"):
            await early.landed()
        await job.update(1)
        assert job.holds(1)


@pytest.mark.parametrize("mode", MODES)
async def test_labels_may_repeat_and_go_down(mode: str, tmp_path: Path) -> None:
    async with running(tmp_path, mode, num_trainers=1, engines={"engine-0": 1}) as job:
        for version in (5, 3, 3, -1):
            deliveries, _ = await job.update(version)
            assert await deliveries[0].applied() == {"engine-0": "applied"}
            assert job.receivers[0].version == version
            assert job.holds(version)


async def test_an_engine_that_does_not_poll_delays_nobody_else(tmp_path: Path) -> None:
    async with running(tmp_path, "async", engines=TWO, relay_patience_s=600.0) as job:
        await (await job.send(1))[0].landed()
        await job.take(0)
        for version in (2, 3, 4):
            await job.send(version)
            assert [update.version for update in await job.take(0)] == [version]
        assert [(await job.take(1))[0].version, (await job.take(1))[0].version] == [1, 4]


async def test_c67_a_wait_for_an_engine_that_does_not_poll_can_end(tmp_path: Path) -> None:
    async with running(tmp_path, "async", engines=TWO) as job:
        delivery = (await job.send(1))[0]
        await delivery.landed(timeout_s=600.0)
        await job.take(0)
        with pytest.raises(BarrierTimeout, match=r"no outcome on engine-1 after 0\.01 s") as late:
            await delivery.applied(timeout_s=0.01)
        assert late.value.missing == ("engine-1",)
        blocking = wbridge.sync.Delivery(delivery._publication)
        with pytest.raises(BarrierTimeout, match="version 1 has no outcome on engine-1"):
            blocking.applied(timeout_s=0.01)
        await job.take(1)
        assert await delivery.applied() == {"engine-0": "applied", "engine-1": "applied"}
        assert blocking.landed(timeout_s=0.0) == blocking.applied(timeout_s=0.0) == delivery.outcomes


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_c67_a_send_that_another_rank_never_makes_ends_and_the_job_goes_on(
    mode: str, tmp_path: Path
) -> None:
    async with running(tmp_path, mode, update_timeout_s=1.0) as job:
        for index in (0, 1):  # the second comes late, and is told so
            with pytest.raises(
                BarrierTimeout, match=r"version 7: trainer rank 1 did not make send 1"
            ) as late:
                await (await job.senders[index].send_weights(7)).landed()
            assert late.value.missing == ("trainer rank 1",)
            assert "raise update_timeout_s" in str(late.value)
        await job.update(8)
        assert job.holds(8)
