"""Sends around the end of an epoch: some ranks have begun one in the old epoch, others do in the new one."""

from __future__ import annotations

from pathlib import Path

import pytest

import wbridge
from tests.models.toy import Rollout
from tests.unit.session.job import Job, gather, rendezvous, running, settings
from wbridge.errors import UpdateAborted

pytestmark = pytest.mark.anyio


async def join(job: Job, path: Path, name: str) -> wbridge.ReceiverAdapter:
    """A further engine joins: a new epoch."""
    rollout = Rollout(name, 0, 1)
    receiver = wbridge.ReceiverAdapter(
        rollout.target, rendezvous=rendezvous(path), config=settings("async", 1)
    )
    job.rollouts.append(rollout)
    job.receivers.append(receiver)
    await receiver.connect()
    return receiver


async def test_a_send_that_ranks_begin_in_two_epochs_joins_no_states_of_the_model(tmp_path: Path) -> None:
    async with running(tmp_path, "async", engines={"engine-0": 1}) as job:
        await job.update(1)
        early = await job.senders[0].send_weights(2)
        joined = await join(job, tmp_path, "engine-1")
        late = await job.senders[1].send_weights(2)
        for delivery in (early, late):
            with pytest.raises(UpdateAborted):
                await delivery.applied()
        for trainer in job.trainers:
            trainer.set_version(3)  # trained on, and sent under the same number
        await gather(*[lambda s=s: s.send_weights(2) for s in job.senders], lambda: job.take())
        assert job.holds(3)
        await job.update(4)
        await joined.aclose()


async def test_ranks_meet_again_when_one_repeats_what_failed_with_the_epoch(tmp_path: Path) -> None:
    async with running(tmp_path, "async", engines={"engine-0": 1}) as job:
        await job.update(2)
        joined = await join(job, tmp_path, "engine-1")
        again = await job.senders[1].send_weights(2)
        await job.update(3)
        with pytest.raises(UpdateAborted, match="version 3 already"):
            await again.applied()
        await job.update(4)
        await joined.aclose()
