"""Engines in different states: new, old, tainted, late, restarted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio.lowlevel
import pytest

import wbridge
from tests.models.toy import Rollout
from tests.unit.session.job import PATIENCE_S, Job, gather, rendezvous, running, toys
from wbridge.errors import UpdateAborted

pytestmark = pytest.mark.anyio
FLEET = {"engine-0": 1, "engine-1": 1, "engine-2": 1}
LOOPBACK = {"transport": "loopback"}


def fail_once_at_group(receiver: wbridge.ReceiverAdapter, index: int) -> None:
    """Let the next copy of one group into the parameters fail."""
    engine = receiver._rollout._engine
    assert engine is not None
    staging: Any = engine._context.staging  # Any: a method of this very object is replaced
    assert len(engine._context.plan.incoming) >= 5
    scatter = staging.scatter

    def failing(group: Any, *args: Any, **more: Any) -> Any:  # Any: passed through
        if group.index == index:
            staging.scatter = scatter
            raise RuntimeError("the copy has failed")
        return scatter(group, *args, **more)

    staging.scatter = failing


@pytest.mark.parametrize("mode", ["sender_overlap", "async"])
async def test_c49_a_failure_midway_on_one_engine_is_that_engines_and_is_reported(
    mode: str, tmp_path: Path
) -> None:
    limits = {"relay_patience_s": 0.05, "slot_nbytes": 1024}
    async with running(tmp_path, mode, num_trainers=1, engines=FLEET, **limits) as job:
        await job.update(1)
        sender, (good, bad, asleep) = job.senders[0], job.receivers
        fail_once_at_group(bad, 2)

        async def fail() -> None:
            with pytest.raises(UpdateAborted, match="version 2"):
                await bad.poll_requests(wait_s=PATIENCE_S)

        deliveries, *_ = await gather(lambda: job.send(2), lambda: job.take(0), fail)
        delivery: wbridge.Delivery = deliveries[0]  # type: ignore[index, assignment]  # deliveries
        while not {"applied", "tainted"} <= set(delivery.outcomes.values()):
            await anyio.sleep(0.001)
        assert delivery.outcomes["engine-1"] == "tainted"
        assert delivery.outcomes["engine-0"] == "applied"

        report = {name: (engine.version, engine.tainted) for name, engine in sender.engines.items()}
        assert report == {"engine-0": (2, False), "engine-1": (None, True), "engine-2": (1, False)}
        assert (good.version, bad.version, asleep.version) == (2, None, 1)
        assert job.rollouts[0].holds(2)
        assert job.rollouts[2].holds(1)
        assert not job.rollouts[1].holds(1)
        assert not job.rollouts[1].holds(2)
        with pytest.raises(UpdateAborted, match="tainted"), bad.step():
            pytest.fail("tainted weights served")
        for receiver, version in ((good, 2), (asleep, 1)):
            with receiver.step() as serving:
                assert serving == version

        async def catch_up(index: int) -> None:
            while job.receivers[index].version != 3:  # the one that was asleep may take 2 first
                await job.receivers[index].poll_requests(wait_s=PATIENCE_S)

        await gather(lambda: job.send(3), *[lambda i=i: catch_up(i) for i in range(3)])  # type: ignore[misc]  # a lambda with a default
        assert job.holds(3)
        while any(engine.version != 3 for engine in sender.engines.values()):
            await anyio.sleep(0.001)
        assert not any(engine.tainted for engine in sender.engines.values())


async def join(job: Job, rollout: Rollout, path: Path) -> wbridge.ReceiverAdapter:
    receiver = wbridge.ReceiverAdapter(rollout.target, rendezvous=rendezvous(path), config=LOOPBACK)
    await receiver.connect()
    job.rollouts.append(rollout)
    job.receivers.append(receiver)
    return receiver


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_c54_a_late_or_restarted_engine_gets_the_whole_version(mode: str, tmp_path: Path) -> None:
    """There are no differences to be put upon a wrong base: each version travels whole, whatever an engine
    had or says that it had."""
    trainers, (early, late) = toys(1, {"engine-0": 1, "engine-1": 1})
    toys_of = (trainers, [early])
    async with running(tmp_path, mode, toys_of=toys_of, engines={"engine-0": 1}) as job:
        for version in (10, 11, 12):
            await job.update(version)
        whole = job.senders[0].counters["put_nbytes"] // 3

        for version in (14, 13):  # late, then restarted with other weights, and a version that goes down
            before = job.senders[0].counters["put_nbytes"]
            receiver = await join(job, late, tmp_path)
            async with receiver:
                assert receiver.version is None
                await job.update(version)
                assert receiver.version == version
                assert job.holds(version)
                assert job.senders[0].counters["put_nbytes"] - before == 2 * whole
            job.receivers.remove(receiver)
            job.rollouts.remove(late)
            for tensor in late.parameters.values():
                tensor.fill_(-7.0)
