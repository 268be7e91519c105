"""Other modes for a running job: by `reconfigure`, and by the settings of its coordinator."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

import wbridge
from tests.unit.session.job import (
    MODES,
    PATIENCE_S,
    Job,
    gather,
    rendezvous,
    running,
    running_sync,
    settings,
    toys,
)
from wbridge.control.local import local_pair
from wbridge.control.messages import Reconfigure, Reconfigured
from wbridge.errors import BarrierTimeout, ConfigError, PeerLost, ProtocolError, UpdateAborted
from wbridge.session.member import Member
from wbridge.session.worker import discover_map

pytestmark = pytest.mark.anyio
FOLLOWING = {"transport": "loopback"}
"""Rollouts that leave the job's settings to the coordinator."""


async def reconfigure(job: Job, **values: object) -> None:
    await gather(*[lambda s=s: s.reconfigure(**values) for s in job.senders])


@pytest.mark.parametrize("order", [MODES, MODES[::-1], ("async", "sync", "async", "receiver_overlap")])
async def test_a_job_goes_through_all_modes_while_engines_poll(
    order: tuple[str, ...], tmp_path: Path
) -> None:
    async with running(tmp_path, order[0], receiver_config=FOLLOWING) as job:
        seen: dict[int, list[int]] = {i: [] for i in range(len(job.receivers))}

        async def poll(index: int) -> None:
            receiver, rollout = job.receivers[index], job.rollouts[index]
            while True:
                if update := await receiver.poll_requests():
                    seen[index].append(update.version)
                async with receiver.step() as version:
                    if version is not None:
                        assert rollout.holds(version)
                await anyio.sleep(0.001)

        async with anyio.create_task_group() as tasks:
            for index in range(len(job.receivers)):
                tasks.start_soon(poll, index)
            versions = itertools.count(1)
            sent = []
            for number, mode in enumerate(order, start=1):
                if number > 1:
                    await reconfigure(job, mode=mode)
                assert {sender.epoch.counter for sender in job.senders if sender.epoch} == {number}
                for _ in range(2):
                    version = next(versions)
                    deliveries = await job.send(version)
                    assert await deliveries[0].applied() == {"engine-0": "applied", "engine-1": "applied"}
                    assert job.holds(version)
                    sent.append(version)
            with anyio.fail_after(PATIENCE_S):  # a poll may return after its engine has answered
                while any(len(versions) < len(sent) for versions in seen.values()):
                    await anyio.sleep(0.001)
            tasks.cancel_scope.cancel()
        assert all(versions == sent for versions in seen.values())


async def test_versions_on_their_way_arrive_before_the_settings_change(tmp_path: Path) -> None:
    """Three versions wait in snapshots, and each engine is to have each one."""
    values = {"delivery": "every", "snapshot_versions": 3}
    async with running(tmp_path, "async", receiver_config=FOLLOWING, **values) as job:
        deliveries = [(await job.send(version))[0] for version in (1, 2, 3)]

        async def take() -> None:
            for version in (1, 2, 3):
                assert [update.version for update in await job.take()] == [version] * 3

        await gather(lambda: reconfigure(job, mode="sync"), take)
        for delivery in deliveries:
            assert await delivery.applied() == {"engine-0": "applied", "engine-1": "applied"}
        assert job.holds(3)
        await job.update(4)
        assert job.holds(4)


async def test_an_engine_that_sleeps_on_a_landed_version_is_dropped_after_a_while(tmp_path: Path) -> None:
    """As when members change: an epoch ends only when every grant has."""
    limits = {"relay_patience_s": 0.05, "update_timeout_s": 0.2}
    async with running(tmp_path, "async", receiver_config=FOLLOWING, **limits) as job:
        awake, asleep = job.of("engine-0"), job.of("engine-1")
        await (await job.send(1))[0].landed()
        await job.take(*awake)
        await reconfigure(job, mode="sync")
        deliveries, _ = await gather(lambda: job.send(2), lambda: job.take(*awake))
        assert await deliveries[0].applied() == {"engine-0": "applied"}  # type: ignore[union-attr]  # deliveries
        with pytest.raises(BarrierTimeout, match="still holds version 1"):
            await job.receivers[asleep[0]].poll_requests(wait_s=PATIENCE_S)


async def test_an_engine_that_sleeps_without_a_version_is_not_waited_for(tmp_path: Path) -> None:
    """With `latest` it may skip versions, so that nobody waits until it can take one."""
    limits = {"relay_patience_s": 0.05, "update_timeout_s": 60.0}
    async with running(tmp_path, "sender_overlap", receiver_config=FOLLOWING, **limits) as job:
        awake = job.of("engine-0")
        deliveries, _ = await gather(lambda: job.send(1), lambda: job.take(*awake))
        await reconfigure(job, mode="async")
        assert await deliveries[0].applied() == {"engine-0": "applied", "engine-1": "missed"}  # type: ignore[union-attr]  # deliveries
        await job.update(2)
        assert job.holds(2)


async def test_ranks_must_ask_for_the_same(tmp_path: Path) -> None:
    async with running(tmp_path, "async", receiver_config=FOLLOWING) as job:

        async def ask(index: int, mode: str) -> None:
            with pytest.raises(ProtocolError, match=r"trainer\[0\] asks for mode = 'sync'.*same values"):
                await job.senders[index].reconfigure(mode=mode)

        await gather(lambda: ask(0, "sync"), lambda: ask(1, "sender_overlap"))
        await job.update(1)
        assert job.holds(1)
        await reconfigure(job, delivery="every")
        await job.update(2)
        assert job.holds(2)


async def test_a_rank_that_does_not_ask_is_named(tmp_path: Path) -> None:
    async with running(tmp_path, "async", receiver_config=FOLLOWING) as job:
        with pytest.raises(BarrierTimeout, match=r"trainer\[1\] did not call reconfigure") as raised:
            await job.senders[0].reconfigure(mode="sync", timeout_s=0.05)
        assert raised.value.missing == ("trainer/trainer[1]",)
        await job.update(1)
        await reconfigure(job, mode="sync")
        await job.update(2)
        assert job.holds(2)


async def test_a_cancelled_request_is_withdrawn_for_all(tmp_path: Path) -> None:
    async with running(tmp_path, "async", num_trainers=3, receiver_config=FOLLOWING) as job:

        async def ask(index: int) -> None:
            with pytest.raises(UpdateAborted, match=r"trainer\[1\] no longer asks"):
                await job.senders[index].reconfigure(mode="sync")

        async def cancel() -> None:
            with anyio.move_on_after(0.05):
                await job.senders[1].reconfigure(mode="sync")

        await gather(cancel, lambda: ask(0))
        await job.update(1)
        await reconfigure(job, mode="sync")
        await job.update(2)
        assert job.holds(2)


async def test_a_change_goes_on_without_those_that_stopped_waiting(tmp_path: Path) -> None:
    """It waits for versions that have landed and are not applied; nobody asks for another one meanwhile."""
    async with running(tmp_path, "async", num_trainers=1, receiver_config=FOLLOWING) as job:
        sender = job.senders[0]
        await (await job.send(1))[0].landed()
        with anyio.move_on_after(0.05):
            await sender.reconfigure(mode="sync")
        with pytest.raises(UpdateAborted, match="being changed already"):
            await sender.reconfigure(mode="sender_overlap")
        await job.take()
        while sender.epoch is None or sender.epoch.counter < 2:
            await anyio.sleep(0.001)
        await job.update(2)
        assert job.holds(2)
        await sender.reconfigure(mode="sync")  # as it is by now


async def test_a_lost_rank_ends_the_request(tmp_path: Path) -> None:
    """Whichever the coordinator hears of first."""
    async with running(tmp_path, "async", receiver_config=FOLLOWING) as job:

        async def ask() -> None:
            with pytest.raises(PeerLost, match=r"trainer\[1\] is lost: .*connect it again, then reconfigure"):
                await job.senders[0].reconfigure(mode="sync")

        await gather(ask, job.senders[1].aclose)
        await ask()


async def test_a_setting_that_a_rollout_has_made_itself_stays(tmp_path: Path) -> None:
    async with running(tmp_path, "async", receiver_config={**FOLLOWING, "mode": "async"}) as job:

        async def ask(index: int) -> None:
            with pytest.raises(
                ConfigError, match=r"rollout/engine-.* sets mode = 'async' \(argument\).*'sync'"
            ):
                await job.senders[index].reconfigure(mode="sync")

        await gather(lambda: ask(0), lambda: ask(1))
        await reconfigure(job, delivery="every")  # that one is free
        await job.update(1)
        assert job.holds(1)


async def test_what_makes_no_sense_is_refused_at_once(tmp_path: Path) -> None:
    async with running(tmp_path, "async", num_trainers=1, receiver_config=FOLLOWING) as job:
        sender = job.senders[0]
        with pytest.raises(ConfigError, match="say what is to change"):
            await sender.reconfigure()
        with pytest.raises(ConfigError, match="asynchronous"):
            await sender.reconfigure(mode="asynchronous")


async def test_an_engine_that_comes_later_gets_the_settings_of_now(tmp_path: Path) -> None:
    trainers, rollouts = toys(1, {"engine-0": 1, "engine-1": 1})
    early, late = rollouts
    toys_of = (trainers, [early])
    async with running(
        tmp_path, "async", toys_of=toys_of, engines={"engine-0": 1}, receiver_config=FOLLOWING
    ) as job:
        await job.update(1)
        await reconfigure(job, mode="sync")
        receiver = wbridge.ReceiverAdapter(late.target, rendezvous=rendezvous(tmp_path), config=FOLLOWING)
        pinned = wbridge.ReceiverAdapter(
            late.target, rendezvous=rendezvous(tmp_path), config={**FOLLOWING, "mode": "async"}
        )
        async with pinned:
            with pytest.raises(ConfigError, match=r"mode = 'async'.*'sync' \(reconfigure\(\)"):
                await pinned.connect()
        async with receiver:
            await receiver.connect()
            job.receivers.append(receiver)
            job.rollouts.append(late)
            await job.update(2)
            assert job.holds(2)


def test_the_blocking_twin_does_the_same(tmp_path: Path) -> None:
    with running_sync(tmp_path, "async", num_trainers=1, receiver_config=FOLLOWING) as job:
        for version, mode in enumerate(("sync", "receiver_overlap"), start=1):
            job.senders[0].reconfigure(mode=wbridge.Mode(mode))
            job.update(version)
            assert job.holds(version)


Setter = Callable[[Path, pytest.MonkeyPatch, str], None]


def by_environment(path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setenv("WBRIDGE_MODE", mode)


def by_file(path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    file = path / "wbridge.toml"
    file.write_text(f'mode = "{mode}"\n')
    monkeypatch.setenv("WBRIDGE_CONFIG", str(file))


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("set_mode", [by_environment, by_file])
@pytest.mark.parametrize("mode", ["async", "sender_overlap"])
async def test_an_operator_sets_the_mode_of_a_whole_job(
    mode: str, set_mode: Setter, everywhere: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the trainers are started, or on all machines."""
    trainers, rollouts = toys(2, {"engine-0": 2})
    values = {name: value for name, value in settings("sync", 1).items() if name != "mode"}
    if not everywhere:
        receivers = [
            wbridge.ReceiverAdapter(r.target, rendezvous=rendezvous(tmp_path), config=FOLLOWING)
            for r in rollouts
        ]
    set_mode(tmp_path, monkeypatch, mode)
    senders = [
        wbridge.SenderAdapter(t.source, rendezvous=rendezvous(tmp_path), config=values) for t in trainers
    ]
    if everywhere:
        receivers = [
            wbridge.ReceiverAdapter(r.target, rendezvous=rendezvous(tmp_path), config=FOLLOWING)
            for r in rollouts
        ]
    adapters = (*senders, *receivers)
    connects: list[Callable[[], Awaitable[None]]] = [adapter.connect for adapter in adapters]
    try:
        await gather(*connects)
        job = Job(trainers, rollouts, senders, receivers)
        await job.update(1)
        assert job.holds(1)
        workers = (*(s._trainer._worker for s in senders), *(r._rollout._worker for r in receivers))
        members = [worker._member for worker in workers]
        assert {member._config.mode.value for member in members if member and member._config} == {mode}
    finally:
        await gather(*[adapter.aclose for adapter in reversed(adapters)])


async def test_the_answer_to_a_request_that_nobody_waits_for_answers_no_other_one(tmp_path: Path) -> None:
    trainers, _ = toys(1, {"engine-0": 1})
    pinned = settings("async", 1)
    sender = wbridge.SenderAdapter(trainers[0].source, rendezvous=rendezvous(tmp_path), config=pinned)
    described = discover_map(trainers[0].source, wbridge.Config())
    member = Member(sender._trainer._worker.job, sender._trainer, described, PATIENCE_S)
    near, far = local_pair("a member", "a coordinator")
    member._lease = near

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(near.deliver, functools.partial(member._act, near, tasks))
        assert "mode" in member._explicit()
        with anyio.move_on_after(0):
            await member.reconfigure({"mode": "sync"}, PATIENCE_S)
        assert await far.receive() == Reconfigure(1, {"mode": "sync"}, PATIENCE_S)
        assert await far.receive() == Reconfigure(1, {})
        assert "mode" not in member._explicit()  # the job may change all the same, and go on with this rank
        far.post(Reconfigured(1))
        far.post(Reconfigured(2, "UpdateAborted", "being changed already"))
        with pytest.raises(UpdateAborted, match="being changed already"):
            await member.reconfigure({"mode": "sender_overlap"}, PATIENCE_S)
        tasks.cancel_scope.cancel()


async def test_a_rank_that_has_left_the_job_says_why(tmp_path: Path) -> None:
    async with running(tmp_path, "async", num_trainers=1, engines={"engine-0": 1}) as job:
        job.senders[0]._trainer._ended = PeerLost("the reason for which it ended")
        with pytest.raises(PeerLost, match="reason for which"):
            await job.senders[0].reconfigure(mode="sync")
