"""Rings that hold less than a version: legal in every mode, whole for the application, with less overlap."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import wbridge
from tests.unit.session.job import MODES, PATIENCE_S, Job, gather, poll_until_lost, running
from wbridge.engine import checks, receive
from wbridge.errors import UpdateAborted, WBridgeError
from wbridge.staging.checksum import checksum
from wbridge.transport.loopback import LoopbackEndpoint

pytestmark = pytest.mark.anyio
ONE = {"engine-0": 1}
TWO_WORKERS = {"engine-0": 2}
NUM_GROUPS = {"engine-0": 4, "engine-1": 6}
"""Of the toy model, in slots of `job.settings`."""
PINNED = ("receiver_overlap", "async")


def engine_of(job: Job, index: int = 0) -> receive.ReceiveEngine:
    engine = job.receivers[index]._rollout._engine
    assert engine is not None
    return engine


async def until_outcome(delivery: wbridge.Delivery, outcome: str) -> None:
    while delivery.outcomes.get("engine-0") != outcome:
        await anyio.sleep(0.001)


async def until_parked(job: Job, *indices: int) -> None:
    """Wait until these workers are held."""
    for index in indices:
        while not job.receivers[index]._rollout._lockstep.follower.flag:
            await anyio.sleep(0.001)


async def send_in_vain(job: Job, index: int) -> None:
    """Send version 2, which no engine will apply: the send says so, or its delivery."""
    job.trainers[index].set_version(2)
    with pytest.raises(WBridgeError):
        await (await job.senders[index].send_weights(2)).applied()


class Gate:
    """Lets so many copies of the transport through, and holds the others until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_copies: int) -> None:
        self.left = num_copies
        self.is_open = False
        self.held = 0

        async def copy(endpoint: LoopbackEndpoint, target: memoryview, source: memoryview) -> None:
            self.left -= 1
            if self.left < 0 and not self.is_open:
                self.held += 1
                await anyio.sleep_forever()  # until the put is cancelled
            target[:] = source

        monkeypatch.setattr(LoopbackEndpoint, "_copy", copy)


async def until_written(job: Job, gate: Gate, *indices: int) -> None:
    """Wait until these workers have begun to write, and the rest of the bytes is held up."""
    while not gate.held or not all(engine_of(job, index).num_written for index in indices):
        await anyio.sleep(0.001)


@pytest.mark.parametrize("num_slots", [1, 2, 3, 5])
@pytest.mark.parametrize("mode", MODES)
async def test_versions_arrive_bit_for_bit_through_every_ring(
    mode: str, num_slots: int, tmp_path: Path
) -> None:
    """Down to one slot, and up to one less than a version takes; with 5, only engine-1 is short of room."""
    async with running(tmp_path, mode, num_slots=num_slots) as job:
        for index, rollout in enumerate(job.rollouts):
            staging = engine_of(job, index)._context.staging
            assert len(engine_of(job, index)._groups) == NUM_GROUPS[rollout.engine]
            assert staging.num_slots == min(num_slots, NUM_GROUPS[rollout.engine])
        for version in (1, 2, 3):
            deliveries, updates = await job.update(version)
            assert job.holds(version)
            assert [update.version for update in updates] == [version] * 3
            assert await deliveries[0].applied() == {"engine-0": "applied", "engine-1": "applied"}


@pytest.mark.parametrize("num_slots", [1, 3])
async def test_landed_is_told_when_all_bytes_have_landed_not_when_the_ring_is_full(
    num_slots: int, tmp_path: Path
) -> None:
    async with running(tmp_path, "async", num_trainers=1, engines=ONE, num_slots=num_slots) as job:
        delivery = (await job.send(1))[0]
        await until_parked(job, 0)
        assert engine_of(job)._ring.states == ("ready",) * num_slots
        assert job.receivers[0].version is None and delivery.outcomes == {}

        assert (await job.take())[0].version == 1
        assert await delivery.landed() in ({"engine-0": "landed"}, {"engine-0": "applied"})
        assert job.holds(1)


@pytest.mark.parametrize("mode", PINNED)
async def test_a_cancelled_poll_before_the_commit_loses_nothing(mode: str, tmp_path: Path) -> None:
    async with running(tmp_path, mode, num_trainers=1, engines=TWO_WORKERS, num_slots=1) as job:

        async def roll() -> None:
            await until_parked(job, 0, 1)
            with anyio.move_on_after(0.05) as scope:
                await job.receivers[0].poll_requests()  # worker 1 does not come
            assert scope.cancelled_caught
            assert [receiver.version for receiver in job.receivers] == [None, None]
            assert [engine_of(job, i)._ring.states for i in range(2)] == [("ready",)] * 2
            await job.take()

        await gather(lambda: job.send(1), roll)
        assert job.holds(1)


@pytest.mark.parametrize("mode", PINNED)
async def test_a_refusal_before_the_commit_loses_nothing(mode: str, tmp_path: Path) -> None:
    class Refuses:
        times = 1

        async def before_apply(self) -> None:
            self.times -= 1
            if self.times == 0:
                raise ValueError("busy")

        async def after_apply(self, update: wbridge.Update | None) -> None:
            return

    options: dict[str, Any] = {"num_slots": 1, "hooks": {1: Refuses()}}
    async with running(tmp_path, mode, num_trainers=1, engines=TWO_WORKERS, **options) as job:

        async def refuse() -> None:
            with pytest.raises(ValueError, match="busy"):
                await job.receivers[1].poll_requests(wait_s=PATIENCE_S)
            await job.take(1)

        await gather(lambda: job.send(1), lambda: job.take(0), refuse)
        assert job.holds(1)


@pytest.mark.parametrize("num_slots", [1, 2])
@pytest.mark.parametrize("mode", PINNED)
async def test_an_abort_after_the_commit_taints_and_the_next_version_heals(
    mode: str, num_slots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"num_slots": num_slots, "num_trainers": 1, "engines": TWO_WORKERS}
    async with running(tmp_path, mode, **options) as job:
        await job.update(1)
        gate = Gate(monkeypatch, 2 * num_slots + 2)

        async def send() -> None:
            async with anyio.create_task_group() as tasks:

                async def cancel() -> None:
                    await until_written(job, gate, 0, 1)
                    tasks.cancel_scope.cancel()

                if mode == "receiver_overlap":  # where a cancelled send is an abort
                    tasks.start_soon(cancel)
                delivery = (await job.send(2))[0]
                await until_written(job, gate, 0, 1)
                await delivery.abort()
                await until_outcome(delivery, "tainted")
            gate.is_open = True
            await job.send(3)

        async def roll(index: int) -> None:
            receiver = job.receivers[index]
            engine_of(job, index).num_written = 0  # of version 1
            with pytest.raises(UpdateAborted, match=r"version 2 .* failed midway"):
                await receiver.poll_requests(wait_s=PATIENCE_S)
            assert receiver.version is None
            with pytest.raises(UpdateAborted, match="tainted"), receiver.step():
                pass
            await job.take(index)

        await gather(send, lambda: roll(0), lambda: roll(1))
        assert job.holds(3)
        assert [receiver.version for receiver in job.receivers] == [3, 3]


@pytest.mark.parametrize("mode", PINNED)
async def test_a_trainer_lost_after_the_commit_taints_its_engines(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1; the coordinator lives, and tells the engine that the rest will not come."""
    async with running(tmp_path, mode, engines=ONE, num_slots=1) as job:
        await job.update(1)
        gate = Gate(monkeypatch, 5)  # two of them are the first group, in each trainer's share

        async def lose() -> None:
            await until_written(job, gate, 0)
            await job.senders[1].aclose()

        async def roll() -> None:
            engine_of(job).num_written = 0
            with pytest.raises(UpdateAborted, match=r"version 2 .* failed midway"):
                await job.receivers[0].poll_requests(wait_s=PATIENCE_S)
            assert job.receivers[0].version is None

        await gather(lambda: send_in_vain(job, 0), lambda: send_in_vain(job, 1), lose, roll)


@pytest.mark.parametrize("mode", PINNED)
async def test_a_coordinator_lost_after_the_commit_does_not_keep_the_engine_parked(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer that runs it is lost with it: the engine waits `coordinator_timeout_s` for the rest."""
    options: dict[str, Any] = {"num_slots": 1, "coordinator_timeout_s": 0.1}
    async with running(tmp_path, mode, num_trainers=1, engines=TWO_WORKERS, **options) as job:
        await job.update(1)
        gate = Gate(monkeypatch, 4)

        async def lose() -> None:
            await until_written(job, gate, 0, 1)
            await job.senders[0].aclose()

        async def roll(index: int) -> None:
            engine_of(job, index).num_written = 0
            with pytest.raises(UpdateAborted, match=r"version 2 .* failed midway"):
                await job.receivers[index].poll_requests(wait_s=PATIENCE_S)

        await gather(lambda: send_in_vain(job, 0), lose, lambda: roll(0), lambda: roll(1))


async def test_a_worker_lost_after_the_commit_ends_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, "async", num_trainers=1, engines=TWO_WORKERS, num_slots=1) as job:
        await job.update(1)
        gate = Gate(monkeypatch, 4)
        await job.send(2)

        async def lose() -> None:
            await until_written(job, gate, 0, 1)
            await job.receivers[1].aclose()

        async def roll(index: int) -> None:
            engine_of(job, index).num_written = 0
            if index == 0:
                await poll_until_lost(job.receivers[0])
            else:
                with pytest.raises(WBridgeError):
                    await job.receivers[1].poll_requests(wait_s=PATIENCE_S)
            assert job.receivers[index].version is None

        await gather(lose, lambda: roll(0), lambda: roll(1))


async def test_an_engine_that_does_not_poll_keeps_no_snapshot_for_ever(tmp_path: Path) -> None:
    """With small rings engines are not independent of each other; the deadline is the bound."""
    engines = {"engine-0": 1, "engine-1": 1}
    options: dict[str, Any] = {"num_slots": 1, "snapshot_versions": 1, "update_timeout_s": 1.0}
    async with running(tmp_path, "async", num_trainers=1, engines=engines, **options) as job:
        first = (await job.send(1))[0]
        await job.take(0)  # engine-1 does not come
        second = (await job.send(2))[0]
        assert await first.applied() == {"engine-0": "applied", "engine-1": "aborted"}
        await job.take()
        assert await second.applied() == {"engine-0": "applied", "engine-1": "applied"}
        assert job.holds(2)


@pytest.mark.parametrize("mode", MODES)
async def test_checksums_are_computed_beside_the_loop(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[str] = set()

    def check(data: memoryview) -> int:
        threads.add(threading.current_thread().name)
        return checksum(data)

    monkeypatch.setattr(checks, "checksum", check)
    async with running(tmp_path, mode, engines=ONE, num_slots=2, checksum="on") as job:
        for version in (1, 2):
            await job.update(version)
            assert job.holds(version)
    assert threads and not [name for name in threads if name.startswith("wbridge")]


async def test_a_slot_whose_bytes_are_being_checked_is_kept_after_an_abort(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, end = threading.Event(), threading.Event()

    def check(data: memoryview) -> int:
        if not begun.is_set():
            begun.set()
            end.wait(PATIENCE_S)
        return checksum(data)

    monkeypatch.setattr(checks, "checksum", check)
    async with running(tmp_path, "async", num_trainers=1, engines=ONE, num_slots=2, checksum="on") as job:
        delivery = (await job.send(1))[0]
        while not begun.is_set():
            await anyio.sleep(0.001)
        await delivery.abort()
        await until_outcome(delivery, "aborted")
        ring = engine_of(job)._ring
        while ring.states.count("free") != 1:  # all but the slot that is read
            await anyio.sleep(0.001)
        assert sorted(ring.states) == ["free", "quarantined"]
        await job.send(2)
        assert "filling" not in ring.states

        end.set()  # what it found is stale by now
        await job.take()
        assert job.holds(2)


async def test_a_writer_that_takes_no_credits_delays_no_other(tmp_path: Path) -> None:
    async with running(tmp_path, "async", engines=ONE) as job:
        engine = engine_of(job)
        stuck = engine._credits[str(job.trainers[0].source.worker)]._endpoint
        send, released = stuck.send, threading.Event()

        async def hang(payload: bytes) -> None:
            while not released.is_set():
                await anyio.sleep(0.001)
            await send(payload)

        stuck.send = hang  # type: ignore[method-assign]  # one writer's way back is stuck
        await job.send(1)
        due = sum(piece.writer == job.trainers[1].source.worker for g in engine._groups for piece in g.pieces)
        while job.senders[1].counters["puts"] < due:
            await anyio.sleep(0.001)
        assert job.senders[0].counters["puts"] == 0
        released.set()
        await job.take()
        assert job.holds(1)
