"""The coordinator's tickets over real connections: what each worker hears, in order."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import zip_longest
from typing import TypeVar

import anyio
import msgspec
import pytest

from tests.unit.control.job import SECRET, Worker, live, rollout, running, together, trainer
from wbridge.config import Config, Mode
from wbridge.control.client import request_status
from wbridge.control.messages import Committed, EpochStart, Keyed, StatusReply, WorkerLost
from wbridge.control.rendezvous import TcpRendezvous
from wbridge.control.tcp import split_address
from wbridge.errors import BarrierTimeout, ProtocolError
from wbridge.flow.messages import (
    Announced,
    CallAborted,
    EngineOutcome,
    Finished,
    Landed,
    Offer,
    OfferRefused,
    Overdue,
    Report,
    Serve,
    TicketAborted,
)
from wbridge.ids import Epoch, WorkerId

pytestmark = pytest.mark.anyio
T = TypeVar("T")

ASYNC = Config(mode=Mode.ASYNC)


@asynccontextmanager
async def job(
    config: Config, *identities: WorkerId, hosts: Sequence[str] = ()
) -> AsyncIterator[list[Worker]]:
    async with running(config) as coordinator, AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(Worker(identity, coordinator.address, host=host))
            for identity, host in zip_longest(identities, hosts, fillvalue="host")
        ]
        await live(*workers)
        yield workers


async def hear(worker: Worker, kind: type[T]) -> T:
    """The next message of this kind, skipping others."""
    while not isinstance(message := await worker.flow(), kind):
        pass
    return message


async def status(worker: Worker) -> StatusReply:
    return await request_status(TcpRendezvous(*split_address(worker.address)), worker.config, secret=SECRET)


async def test_one_update_from_report_to_outcome() -> None:
    async with job(ASYNC, trainer(0, 2), trainer(1, 2), rollout("e0", 0, 2), rollout("e0", 1, 2)) as workers:
        first, second, leader, _ = workers
        leader.post(Offer(1))
        first.post(Report(1, 42, b"meta"))
        second.post(Report(1, 42, b"meta"))
        for worker in (first, second, leader):
            assert await worker.flow() == Announced(1, 42, 1)
            assert await worker.flow() == Serve(1, 42, ("e0",), b"meta")
        assert (await status(first)).waiting_for == ("engine e0 (version 42)",)
        leader.post(Landed(1))
        leader.post(Finished(1, "applied"))
        for rank in (first, second):
            assert await hear(rank, EngineOutcome) == EngineOutcome(1, "e0", "landed", False)
            assert await hear(rank, EngineOutcome) == EngineOutcome(1, "e0", "applied", True)

        reply = await status(first)
        assert reply.announced == 42
        assert reply.waiting_for == ()
        [engine] = reply.engines
        assert (engine.version, engine.lag, engine.tainted, engine.live) == (42, 0, False, True)


async def test_ranks_that_send_different_versions_are_told() -> None:
    async with job(ASYNC, trainer(0, 2), trainer(1, 2), rollout()) as (first, second, _):
        first.post(Report(1, 42))
        second.post(Report(1, 43))
        for rank in (first, second):
            aborted = await hear(rank, CallAborted)
            assert aborted.protocol_error
            assert "42" in aborted.reason
            assert "43" in aborted.reason


async def test_a_lost_engine_does_not_stop_the_others() -> None:
    config = Config(mode=Mode.ASYNC, num_engines=2)
    async with job(config, trainer(), rollout("e0"), rollout("e1", 0, 2), rollout("e1", 1, 2)) as workers:
        t, leader, dying, mate = workers
        leader.post(Offer(1))
        dying.post(Offer(1))
        await status(t)
        t.post(Report(1, 42))
        assert set((await hear(t, Serve)).engines) == {"e0", "e1"}
        await hear(leader, Serve)
        mate.lease.abort("killed")

        lost = await t.next()
        assert isinstance(lost, WorkerLost)
        assert lost.worker == mate.id
        assert (await hear(t, TicketAborted)).engines == ("e1",)
        assert await hear(t, EngineOutcome) == EngineOutcome(1, "e1", "lost", True)
        assert isinstance(await leader.next(), WorkerLost)
        leader.post(Landed(1))
        assert await hear(t, EngineOutcome) == EngineOutcome(1, "e0", "landed", False)
        leader.post(Finished(1, "applied"))
        assert await hear(t, EngineOutcome) == EngineOutcome(1, "e0", "applied", True)
        assert {engine.engine: engine.live for engine in (await status(t)).engines} == {
            "e0": True,
            "e1": False,
        }


async def test_a_lost_rank_ends_what_has_not_landed() -> None:
    async with job(ASYNC, trainer(0, 2), trainer(1, 2), rollout()) as (first, second, leader):
        leader.post(Offer(1))
        first.post(Report(1, 42))
        second.post(Report(1, 42))
        await hear(leader, Serve)
        await hear(first, Serve)
        second.lease.abort("killed")
        for worker in (first, leader):
            assert isinstance(await worker.next(), WorkerLost)
            assert (await hear(worker, TicketAborted)).everywhere


async def test_an_engine_that_does_not_offer_is_missed_after_the_patience() -> None:
    config = Config(mode=Mode.ASYNC, num_engines=2, relay_patience_s=0.02)
    async with job(config, trainer(), rollout("e0"), rollout("e1")) as (t, prompt, _):
        prompt.post(Offer(1))
        t.post(Report(1, 42))
        assert (await hear(t, Serve)).engines == ("e0",)
        assert await hear(t, EngineOutcome) == EngineOutcome(1, "e1", "missed", False)


async def grace_of(config: Config, took_s: float, *, hosts: tuple[str, str]) -> float:
    """How long an engine that is ready is not served version 2, while its neighbour holds version 1, which
    took so long to arrive."""
    async with job(config, trainer(0), rollout("e0"), rollout("e1"), hosts=("trainers", *hosts)) as workers:
        rank, awake, asleep = workers
        awake.post(Offer(1))
        asleep.post(Offer(1))
        rank.post(Report(1, 7))
        assert (await hear(awake, Serve)).engines == ("e0", "e1")
        await anyio.sleep(took_s)
        awake.post(Landed(1))
        asleep.post(Landed(1))
        awake.post(Finished(1, "applied"))
        awake.post(Offer(2))
        begun_s = anyio.current_time()
        rank.post(Report(2, 8))
        assert (await hear(awake, Serve)).engines == ("e0",)
        return anyio.current_time() - begun_s


async def test_a_neighbour_that_does_not_apply_is_waited_for_as_long_as_a_version_took() -> None:
    patient = Config(mode=Mode.ASYNC, num_engines=2, relay_patience_s=60)
    assert await grace_of(patient, 0.2, hosts=("here", "there")) >= 0.2
    hasty = Config(mode=Mode.ASYNC, num_engines=2, relay_patience_s=0.05)
    assert 0.1 <= await grace_of(hasty, 1.0, hosts=("here", "there")) < 1.0  # one outage counts by doubling


async def test_engines_that_share_no_copy_do_not_wait_for_each_other() -> None:
    config = Config(mode=Mode.ASYNC, num_engines=2, relay_patience_s=60)
    assert await grace_of(config, 1.0, hosts=("trainers", "trainers")) < 1.0
    alone = msgspec.structs.replace(config, relays="off")
    assert await grace_of(alone, 1.0, hosts=("here", "there")) < 1.0


async def test_the_grace_leaves_time_for_the_copy() -> None:
    config = Config(mode=Mode.ASYNC, num_engines=2, relay_patience_s=60, update_timeout_s=1.2)
    assert 0.09 <= await grace_of(config, 1.0, hosts=("here", "there")) < 1.0


async def test_an_engine_that_does_not_land_in_time_is_named() -> None:
    async with job(Config(update_timeout_s=0.05), trainer(), rollout()) as (t, leader):
        t.post(Report(1, 42))
        await hear(leader, Announced)
        leader.post(Offer(1))
        await hear(leader, Serve)
        overdue = await hear(t, Overdue)
        assert overdue.missing == ("e0",)
        assert (await hear(leader, TicketAborted)).engines == ("e0",)


async def test_an_epoch_ends_only_when_its_grants_have() -> None:
    async with running(ASYNC) as coordinator, AsyncExitStack() as stack:
        t, leader, late = [
            await stack.enter_async_context(Worker(w, coordinator.address))
            for w in (trainer(), rollout("e0"), rollout("late"))
        ]
        await live(t, leader)
        leader.post(Offer(1))
        t.post(Report(1, 42))
        await hear(leader, Serve)
        await hear(t, Serve)

        late.join()
        t.post(Report(2, 43))  # announced or burnt, depending on who is first; the epoch ends either way
        while (reply := await status(t)).phase != "ending":
            pass
        assert reply.epoch == t.epoch
        leader.post(Offer(2))
        assert (await hear(leader, OfferRefused)).offer == 2
        leader.post(Landed(1))
        leader.post(Finished(1, "applied"))
        await together(t, leader, late)
        assert t.epoch == Epoch(coordinator.incarnation, 2)

        leader.post(Offer(3))
        late.post(Offer(1))
        t.post(Report(1, 44))
        announced = await hear(t, Announced)
        assert announced.ticket > 1, "ticket numbers go on in the next epoch"
        assert {engine.engine: engine.version for engine in (await status(t)).engines} == {
            "e0": 42,
            "late": None,
        }


async def test_an_engine_that_never_finishes_does_not_hold_up_the_next_epoch_for_ever() -> None:
    config = Config(mode=Mode.ASYNC, update_timeout_s=0.1)
    async with running(config) as coordinator, AsyncExitStack() as stack:
        t, stuck, late = [
            await stack.enter_async_context(Worker(w, coordinator.address))
            for w in (trainer(), rollout("e0"), rollout("late"))
        ]
        await live(t, stuck)
        stuck.post(Offer(1))
        t.post(Report(1, 42))
        await hear(stuck, Serve)
        stuck.post(Landed(1))
        late.join()
        with pytest.raises(BarrierTimeout, match=r"'e0' still holds version 42") as caught:
            while True:
                await stuck.next()
        assert caught.value.missing == ("e0",)
        await together(t, late)


async def test_a_message_of_another_epoch_is_dropped() -> None:
    async with job(ASYNC, trainer(), rollout()) as (t, _):
        assert t.epoch is not None
        t.lease.post(Keyed(Epoch(t.epoch.incarnation, 99), Report(1, 42)))
        t.lease.post(Keyed(Epoch(t.epoch.incarnation + 1, 1), Report(1, 42)))
        t.post(Report(1, 43))
        assert (await hear(t, Announced)).version == 43


@pytest.mark.parametrize("speaker", [0, 1, 2])
async def test_a_message_out_of_place_ends_the_speakers_stay(speaker: int) -> None:
    wrong = [Offer(1), Report(1, 42), Offer(1)][speaker]
    async with job(ASYNC, trainer(), rollout("e0", 0, 2), rollout("e0", 1, 2)) as workers:
        workers[speaker].post(wrong)
        with pytest.raises(ProtocolError, match=type(wrong).__name__):
            while True:
                await workers[speaker].next()


async def test_a_worker_that_comes_back_says_what_it_holds() -> None:
    async with running(ASYNC) as coordinator, AsyncExitStack() as stack:
        t = await stack.enter_async_context(Worker(trainer(), coordinator.address))
        r = Worker(rollout(), coordinator.address, committed=Committed(Epoch(7, 1), 5, 41))
        await live(t, await stack.enter_async_context(r))
        [engine] = (await status(t)).engines
        assert (engine.version, engine.tainted) == (41, False)


async def test_a_new_epoch_starts_for_everybody_when_one_process_connects_again() -> None:
    async with running(ASYNC) as coordinator, AsyncExitStack() as stack:
        t, r = [
            await stack.enter_async_context(Worker(w, coordinator.address)) for w in (trainer(), rollout())
        ]
        await live(t, r)
        again = await stack.enter_async_context(Worker(rollout(), coordinator.address))
        again.join()
        await together(t, again)
        assert isinstance(t.start, EpochStart)
        assert t.epoch == Epoch(coordinator.incarnation, 2)
