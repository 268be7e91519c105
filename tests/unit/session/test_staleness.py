"""How far each engine lags, as the trainer sees it, as an engine sees it, and as `wbridge status` says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anyio
import msgspec
import pytest

import wbridge
from tests.unit.session.job import MODES, PATIENCE_S, Job, gather, rendezvous, running, toys
from tests.unit.session.test_steps import failing_once
from wbridge import EngineStatus
from wbridge.config import Config
from wbridge.control.client import request_status
from wbridge.control.messages import StatusReply
from wbridge.control.rendezvous import parse_rendezvous
from wbridge.errors import UpdateAborted

pytestmark = pytest.mark.anyio
QUICK = {"relay_patience_s": 0.05}


async def status(path: Path) -> StatusReply:
    return await request_status(parse_rendezvous(rendezvous(path), {}), Config())


async def agreed(
    job: Job, path: Path, are_there: Callable[[dict[str, EngineStatus]], bool]
) -> dict[str, EngineStatus]:
    """What the coordinator and every trainer rank say, once they say the same and `are_there` of it.

    Each hears of an outcome in its own time.
    """
    said: list[dict[str, EngineStatus]] = []
    with anyio.move_on_after(PATIENCE_S / 2):
        while not (said and are_there(said[0]) and all(other == said[0] for other in said)):
            await anyio.sleep(0.001)
            reply = {engine.engine: engine for engine in (await status(path)).engines}
            said = [reply, *(dict(sender.engines) for sender in job.senders)]
        return said[0]
    raise AssertionError(f"the coordinator and the ranks say {said}")


@pytest.mark.parametrize("mode", MODES)
async def test_every_rank_knows_what_each_engine_has(mode: str, tmp_path: Path) -> None:
    async with running(tmp_path, mode) as job:
        unknown = {
            name: EngineStatus(name, live=True, version=None, lag=0, tainted=False, ticket=0)
            for name in ("engine-0", "engine-1")
        }
        await agreed(job, tmp_path, unknown.__eq__)
        for number, version in enumerate((40, 41, 7), start=1):
            _, updates = await job.update(version)
            assert {update.stats.lag for update in updates} == {0}
            expected = {
                name: EngineStatus(name, live=True, version=version, lag=0, tainted=False, ticket=number)
                for name in ("engine-0", "engine-1")
            }
            await agreed(job, tmp_path, expected.__eq__)


async def test_c53_an_engine_that_is_five_versions_behind_catches_up_in_one_apply(tmp_path: Path) -> None:
    async with running(tmp_path, "async", num_trainers=1, **QUICK) as job:
        sender, awake, asleep = job.senders[0], job.of("engine-0"), job.of("engine-1")
        await job.update(1)
        await (await job.send(2))[0].landed()
        await job.take(*awake)
        for version in (3, 4, 5, 6):
            delivery = (await job.send(version))[0]
            await job.take(*awake)
            assert (await delivery.applied())["engine-0"] == "applied"
        engines = await agreed(job, tmp_path, lambda those: those["engine-0"].lag == 0)
        assert engines["engine-1"].lag == 5
        assert (engines["engine-0"].version, engines["engine-1"].version) == (6, 1)
        assert sender.last_send is not None
        assert sender.last_send.lag >= 4

        waiting = (await status(tmp_path)).waiting_for
        assert waiting == ("engine engine-1 (version 2)",)
        (second,) = await job.take(*asleep)  # had landed before it fell behind
        assert (second.version, second.stats.lag) == (2, 4)
        (newest,) = await job.take(*asleep)
        assert (newest.version, newest.stats.lag) == (6, 0)
        assert job.holds(6)
        await agreed(job, tmp_path, lambda those: those["engine-1"].lag == 0)


async def test_c53_a_direct_engine_that_is_five_versions_behind_catches_up_in_one_apply(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, "sender_overlap", num_trainers=1, **QUICK) as job:
        awake, asleep = job.of("engine-0"), job.of("engine-1")
        await job.update(1)
        for version in (2, 3, 4, 5, 6):
            deliveries, _ = await gather(lambda v=version: job.send(v), lambda: job.take(*awake))  # type: ignore[misc]  # a lambda with a default
            await deliveries[0].applied()  # type: ignore[union-attr]  # deliveries
        assert job.senders[0].engines["engine-1"].lag == 5
        (newest,) = await job.take(*asleep)
        assert (newest.version, newest.stats.lag) == (6, 0)
        assert job.holds(6)


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_a_tainted_engine_is_seen_until_a_whole_version_lands(mode: str, tmp_path: Path) -> None:
    fails = failing_once("cannot repack")

    def retarget(index: int, target: wbridge.Target) -> wbridge.Target:
        return msgspec.structs.replace(target, after_apply=fails) if index == 2 else target

    async with running(tmp_path, mode, retarget=retarget) as job:
        (bad,) = job.of("engine-1")

        async def fail() -> None:
            with pytest.raises(UpdateAborted):
                await job.receivers[bad].poll_requests(wait_s=PATIENCE_S)

        await gather(lambda: job.send(1), lambda: job.take(*job.of("engine-0")), fail)
        engines = await agreed(job, tmp_path, lambda those: those["engine-1"].tainted)
        assert engines["engine-1"] == EngineStatus(
            "engine-1", live=True, version=None, lag=1, tainted=True, ticket=0
        )
        assert not engines["engine-0"].tainted
        await job.update(2)
        await agreed(job, tmp_path, lambda those: not any(engine.tainted for engine in those.values()))


async def test_an_engine_that_leaves_is_not_live_and_another_epoch_is_without_it(tmp_path: Path) -> None:
    async with running(tmp_path, "async", num_trainers=1, **QUICK) as job:
        sender = job.senders[0]
        await job.update(1)
        (leaver,) = job.of("engine-1")
        await job.receivers[leaver].aclose()
        while sender.engines["engine-1"].live:
            await anyio.sleep(0.001)
        assert sender.engines["engine-1"].version == 1
        await agreed(job, tmp_path, lambda those: not those["engine-1"].live)
        await job.send(2)
        await job.take(*job.of("engine-0"))
        assert sender.last_send is not None
        assert sender.last_send.lag <= 1  # of those that are there


async def test_what_engines_had_is_known_in_the_next_epoch_and_to_another_trainer(tmp_path: Path) -> None:
    trainers, rollouts = toys(1, {"engine-0": 1, "engine-1": 1})
    early, late = rollouts
    toys_of = (trainers, [early])
    async with running(tmp_path, "async", toys_of=toys_of, engines={"engine-0": 1}) as job:
        for version in (5, 6):
            await job.update(version)
        config = {"transport": "loopback"}
        async with wbridge.ReceiverAdapter(
            late.target, rendezvous=rendezvous(tmp_path), config=config
        ) as receiver:
            await receiver.connect()
            expected = {
                "engine-0": EngineStatus("engine-0", True, 6, 0, False, 2),
                "engine-1": EngineStatus("engine-1", True, None, 2, False, 0),
            }
            await agreed(job, tmp_path, expected.__eq__)


async def test_status_names_whom_a_send_waits_for(tmp_path: Path) -> None:
    async with running(tmp_path, "sync", num_trainers=2) as job:
        for trainer in job.trainers:
            trainer.set_version(3)

        async def waits_for(*names: str) -> None:
            while (await status(tmp_path)).waiting_for != names:
                await anyio.sleep(0.001)

        async def look_and_go_on() -> None:
            await waits_for("trainer/trainer[1] (send 1)")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(job.senders[1].send_weights, 3)
                await waits_for("engine engine-0 (version 3)", "engine engine-1 (version 3)")
                tasks.start_soon(job.take)

        await gather(lambda: job.senders[0].send_weights(3), look_and_go_on)
        await waits_for()
