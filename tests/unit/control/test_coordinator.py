from __future__ import annotations

import logging
from contextlib import AsyncExitStack

import anyio
import pytest

from tests.unit.control.job import SECRET, Worker, live, rollout, running, source_map, together, trainer
from wbridge.config import Config, Mode
from wbridge.control import epochs
from wbridge.control.client import request_status
from wbridge.control.coordinator import Coordinator
from wbridge.control.messages import Bye, EpochLive, EpochReady, EpochStart, Join, WorkerLost
from wbridge.control.planning import unpacked_slice
from wbridge.control.rendezvous import TcpRendezvous
from wbridge.control.tcp import connect_tcp, split_address
from wbridge.errors import (
    AuthenticationError,
    BarrierTimeout,
    ConfigError,
    LayoutError,
    PeerLost,
    ProtocolError,
)
from wbridge.ids import Epoch, WorkerId

pytestmark = pytest.mark.anyio


async def test_an_epoch_starts_when_the_trainers_and_the_engines_are_complete() -> None:
    config = Config(num_engines=2, slot_nbytes=4096, mode=Mode.ASYNC)
    identities = [trainer(0, 2), trainer(1, 2), rollout("e0"), rollout("e1", 0, 2), rollout("e1", 1, 2)]
    async with running(config) as coordinator, AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(Worker(w, coordinator.address)) for w in identities]
        await live(*workers)

        for worker in workers:
            assert worker.config.slot_nbytes == 4096
            assert worker.config.mode is Mode.ASYNC
            assert worker.epoch == Epoch(coordinator.incarnation, 1)
            assert worker.start is not None
            assert worker.start.engines == ("e0", "e1")
            assert worker.start.ranks == (trainer(0, 2), trainer(1, 2))
        first = {peer.worker: peer for peer in workers[0].start.peers}
        assert set(first) == {*identities} - {rollout("e1", 1, 2)}, "its group and those it writes to"
        assert first[rollout("e0")].transport_address == b"address of rollout/e0[0]"
        assert first[rollout("e0")].lockstep_address == "lockstep of rollout/e0[0]"


async def test_each_worker_gets_its_slice_of_one_plan() -> None:
    async with running() as coordinator, AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(Worker(w, coordinator.address))
            for w in (trainer(0, 2), trainer(1, 2), rollout())
        ]
        for worker in workers:
            worker.join()
        async with anyio.create_task_group() as tasks:
            plans = {}

            async def get(worker: Worker) -> None:
                plans[worker.id] = await worker.go_live()

            for worker in workers:
                tasks.start_soon(get, worker)

    assert len({plan.fingerprint for plan in plans.values()}) == 1
    assert len(plans[rollout()].incoming) == 1
    assert [len(plans[trainer(rank, 2)].outgoing) for rank in (0, 1)] == [1, 1]


async def test_nothing_is_live_before_all_are_ready() -> None:
    async with (
        running() as coordinator,
        Worker(trainer(), coordinator.address) as t,
        Worker(rollout(), coordinator.address) as r,
    ):
        t.join()
        r.join()
        start = await t.next()
        assert isinstance(start, EpochStart)
        t.lease.post(EpochReady(Epoch(start.epoch.incarnation, 99)))
        t.lease.post(EpochReady(start.epoch))
        reply = await request_status(TcpRendezvous(*split_address(t.address)), t.config, secret=SECRET)
        assert reply.phase == "opening"
        assert "rollout/e0[0] (opening epoch)" in reply.waiting_for

        await r.go_live()
        assert await t.next() == EpochLive(start.epoch)


async def test_c64_identities_are_explicit_and_never_computed() -> None:
    """2 data-parallel engines of 2 workers, each of which counts its ranks from 0."""
    identities = [rollout(engine, rank, 2) for engine in ("dp0", "dp1") for rank in (0, 1)]
    async with running(Config(num_engines=2)) as coordinator, AsyncExitStack() as stack:
        workers = {
            w: await stack.enter_async_context(Worker(w, coordinator.address))
            for w in (trainer(), *identities)
        }
        await live(*workers.values())

        assert workers[trainer()].start is not None
        receivers = {peer.worker for peer in workers[trainer()].start.peers} - {trainer()}
        assert receivers == set(identities)
        for identity in identities:
            start = workers[identity].start
            assert start is not None
            plan = unpacked_slice(start.plan, identity)
            assert plan.worker == identity
            assert plan.incoming[0].pieces[0].transfers[0].source.offset == identity.rank * 16


async def test_c66_geometry_is_the_coordinators_and_a_worker_that_insists_on_another_is_refused() -> None:
    job = Config(slot_nbytes=4 * 2**20)
    async with running(job, {"slot_nbytes": "wbridge.toml"}) as coordinator:
        async with Worker(rollout(), coordinator.address) as silent:
            assert silent.config.slot_nbytes == 4 * 2**20

        eight = Config(slot_nbytes=8 * 2**20)
        with pytest.raises(ConfigError) as caught:
            async with Worker(
                trainer(), coordinator.address, config=eight, origins={"slot_nbytes": "WBRIDGE_SLOT_NBYTES"}
            ):
                pass
        for word in (
            "trainer/train[0]",
            "slot_nbytes",
            "8388608",
            "4194304",
            "WBRIDGE_SLOT_NBYTES",
            "wbridge.toml",
        ):
            assert word in str(caught.value)

        async with Worker(trainer(), coordinator.address, config=job, origins={"slot_nbytes": "argument"}):
            pass  # explicit, and the same


async def test_a_wrong_secret_does_not_get_in() -> None:
    async with running() as coordinator:
        with pytest.raises(AuthenticationError):
            await connect_tcp(coordinator.address, secret=b"guess")


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (rollout("e0"), rollout("e0"), ("rollout/e0[0] is claimed twice", "'here'", "'there'", "127.0.0.1:")),
        (rollout("e0", 0, 2), rollout("e0", 1, 3), ("two meshes", "(2,)", "(3,)")),
        (trainer(), trainer(group="other"), ("one trainer group", "'train'", "'other'")),
    ],
)
async def test_contradicting_identities_are_refused(
    first: WorkerId, second: WorkerId, words: tuple[str, ...]
) -> None:
    async with running() as coordinator, Worker(first, coordinator.address, host="here", token="1") as holder:
        with pytest.raises(ConfigError) as caught:
            async with Worker(second, coordinator.address, host="there", token="2"):
                pass
        for word in words:
            assert word in str(caught.value)

        reply = await request_status(
            TcpRendezvous(*split_address(holder.address)), holder.config, secret=SECRET
        )
        assert [member.worker for member in reply.members] == [first], "the first one stays"


async def test_a_process_that_connects_again_replaces_its_old_connection() -> None:
    async with (
        running() as coordinator,
        Worker(rollout(), coordinator.address) as old,
        Worker(rollout(), coordinator.address) as new,
    ):
        with pytest.raises(PeerLost):
            await old.next()
        async with Worker(trainer(), coordinator.address) as t:
            await live(t, new)


async def test_a_peer_that_never_comes_is_named() -> None:
    config = Config(num_engines=2, connect_timeout_s=2.0)  # all that are here must have come by then
    async with running(config) as coordinator, AsyncExitStack() as stack:
        here = [trainer(0, 2), rollout("e0", 0, 2)]
        workers = [await stack.enter_async_context(Worker(w, coordinator.address)) for w in here]
        await stack.enter_async_context(Worker(rollout("e0", 1, 2), coordinator.address))
        for worker in workers:
            worker.join()
        for worker in workers:
            with pytest.raises(BarrierTimeout) as caught:
                await worker.next()
            assert caught.value.missing == (
                "trainer/train[1]",
                "rollout/e0[1] (connected, has not described its weights yet)",
                "1 of 2 engines (nobody has connected)",
            )
            assert "trainer/train[1]" in str(caught.value)
            assert "connect_timeout_s" in str(caught.value)


async def test_a_worker_may_have_less_patience_than_the_job() -> None:
    async with running() as coordinator, Worker(rollout(), coordinator.address) as hasty:
        hasty.join(patience_s=0.05)
        with pytest.raises(BarrierTimeout, match=r"waited 0\.05 s for trainer group"):
            await hasty.next()


async def test_those_waited_for_are_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(epochs, "QUIET_S", 0.02)
    caplog.set_level(logging.INFO, "wbridge")
    async with (
        running(Config(connect_timeout_s=0.1)) as coordinator,
        Worker(rollout(), coordinator.address) as waiting,
    ):
        waiting.join()
        with pytest.raises(BarrierTimeout):
            await waiting.next()
    records = [r for r in caplog.records if r.getMessage() == "still waiting for members"]
    assert [r.__dict__["missing"] for r in records] == [("trainer group (nobody has connected)",)]


async def test_a_worker_that_does_not_get_ready_is_named() -> None:
    async with (
        running(Config(connect_timeout_s=0.1)) as coordinator,
        Worker(trainer(), coordinator.address) as t,
        Worker(rollout(), coordinator.address) as r,
    ):
        t.join()
        r.join()
        await t.be_ready()
        assert isinstance(await r.next(), EpochStart)
        with pytest.raises(BarrierTimeout, match=r"rollout/e0\[0\] was not ready") as caught:
            await r.next()
        assert caught.value.missing == ("rollout/e0[0]",)
        assert isinstance(await t.next(), WorkerLost)


async def test_an_impossible_plan_is_told_to_every_worker() -> None:
    async with (
        running() as coordinator,
        Worker(trainer(), coordinator.address) as t,
        Worker(rollout(), coordinator.address) as r,
    ):
        t.join()
        r.join(source_map(r.id, dtype="int64"))
        texts = set()
        for worker in (t, r):
            with pytest.raises(LayoutError) as caught:
                await worker.next()
            texts.add(str(caught.value))
        assert len(texts) == 1


async def test_an_impossible_newcomer_does_not_disturb_the_epoch() -> None:
    async with running() as coordinator, AsyncExitStack() as stack:
        t, r, late = [
            await stack.enter_async_context(Worker(w, coordinator.address))
            for w in (trainer(), rollout(), rollout("late"))
        ]
        await live(t, r)
        late.join(source_map(late.id, dtype="int64"))
        with pytest.raises(LayoutError):
            await late.next()
        reply = await request_status(TcpRendezvous(*split_address(t.address)), t.config, secret=SECRET)
        assert (reply.phase, reply.epoch) == ("live", t.epoch)


async def test_no_source_map_and_no_sense_are_refused() -> None:
    async with running() as coordinator:
        async with Worker(trainer(), coordinator.address) as t:
            t.lease.post(Join(b"\xc1", b""))
            with pytest.raises(ProtocolError, match="no source map"):
                await t.next()
        async with Worker(trainer(), coordinator.address) as t:
            t.lease.post(EpochLive(Epoch(1, 1)))
            with pytest.raises(ProtocolError, match="EpochLive"):
                await t.next()
        async with await connect_tcp(coordinator.address, secret=SECRET) as stranger:
            await stranger.send(Bye())
            with pytest.raises(ProtocolError, match="instead of Hello"):
                await stranger.receive()


async def test_a_later_engine_joins_in_the_next_epoch() -> None:
    async with running() as coordinator, AsyncExitStack() as stack:
        t, r = [
            await stack.enter_async_context(Worker(w, coordinator.address)) for w in (trainer(), rollout())
        ]
        await live(t, r)
        halves = [
            await stack.enter_async_context(Worker(rollout("late", rank, 2), coordinator.address))
            for rank in (0, 1)
        ]
        halves[0].join()
        halves[1].join()
        await together(t, r, *halves)
        assert t.epoch == Epoch(coordinator.incarnation, 2)
        assert t.start is not None
        assert t.start.engines == ("e0", "late")


async def test_an_engine_is_lost_and_comes_back() -> None:
    async with running() as coordinator, AsyncExitStack() as stack:
        t, r, other = [
            await stack.enter_async_context(Worker(w, coordinator.address))
            for w in (trainer(), rollout(), rollout("e1"))
        ]
        await live(t, r)
        await live_after_joining(other, t, r)
        other.lease.abort("killed")
        for worker in (t, r):
            lost = await worker.next()
            assert isinstance(lost, WorkerLost)
            assert lost.worker == other.id

        again = await stack.enter_async_context(Worker(rollout("e1"), coordinator.address, token="restarted"))
        await live_after_joining(again, t, r)
        assert t.epoch == Epoch(coordinator.incarnation, 3)


async def live_after_joining(newcomer: Worker, *others: Worker) -> None:
    newcomer.join()
    await together(newcomer, *others)


async def test_the_trainers_restart() -> None:
    async with running() as coordinator, AsyncExitStack() as stack:
        r = await stack.enter_async_context(Worker(rollout(), coordinator.address))
        async with Worker(trainer(), coordinator.address) as t:
            await live(t, r)
        lost = await r.next()
        assert isinstance(lost, WorkerLost)
        assert lost.worker == trainer()

        ranks = [
            await stack.enter_async_context(Worker(trainer(rank, 2), coordinator.address)) for rank in (0, 1)
        ]
        ranks[0].join()
        await live_after_joining(ranks[1], ranks[0], r)
        assert r.epoch == Epoch(coordinator.incarnation, 2)


async def test_a_member_lost_while_an_epoch_opens_does_not_block_the_next() -> None:
    async with running() as coordinator, AsyncExitStack() as stack:
        t, r, dying = [
            await stack.enter_async_context(Worker(w, coordinator.address))
            for w in (trainer(), rollout(), rollout("e1"))
        ]
        await live(t, r)
        dying.join()
        for worker in (t, r):
            await worker.be_ready()
        assert isinstance(await dying.next(), EpochStart)
        dying.lease.abort("killed")

        await together(t, r)
        assert t.epoch == Epoch(coordinator.incarnation, 3)
        assert t.start is not None
        assert t.start.engines == ("e0",)


async def test_a_member_says_goodbye() -> None:
    async with (
        running() as coordinator,
        Worker(trainer(), coordinator.address) as t,
        Worker(rollout(), coordinator.address) as r,
    ):
        await live(t, r)
        r.lease.post(Bye())
        lost = await t.next()
        assert lost == WorkerLost(r.id, "it said goodbye")


async def test_the_coordinator_says_goodbye() -> None:
    async with (
        running() as coordinator,
        Worker(trainer(), coordinator.address) as t,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(coordinator.leave)
        assert await t.next() == Bye()
        t.lease.abort("the coordinator has left")


async def test_the_coordinator_dies() -> None:
    coordinator, server = Coordinator(Config(), secret=SECRET), anyio.CancelScope()

    async def serve(*, task_status: anyio.abc.TaskStatus[str]) -> None:
        with server:
            await coordinator.serve(task_status=task_status)

    async with anyio.create_task_group() as tasks:
        address = await tasks.start(serve)
        async with Worker(trainer(), address) as worker:
            server.cancel()
            with pytest.raises(PeerLost, match=address):
                await worker.next()


async def test_a_coordinator_that_is_not_there() -> None:
    async with running() as coordinator:
        address = coordinator.address
    with pytest.raises(BarrierTimeout, match=rf"no coordinator within 0\.1 s .*{address}") as caught:
        async with Worker(trainer(), address, config=Config(connect_timeout_s=0.1)):
            pass
    assert caught.value.missing == ("coordinator",)
