"""Other settings for a running job, as the coordinator agrees on them: when it changes, and when not."""

from __future__ import annotations

from contextlib import AsyncExitStack

import anyio
import pytest

from tests.unit.control.job import Worker, live, rollout, running, together, trainer
from wbridge.config import Config, Mode
from wbridge.control import epochs
from wbridge.control.coordinator import Coordinator
from wbridge.control.messages import (
    EpochLive,
    EpochReady,
    EpochStart,
    Reconfigure,
    Reconfigured,
    StatusReply,
    StatusRequest,
    WorkerLost,
)
from wbridge.errors import ConfigError, PlanError

pytestmark = pytest.mark.anyio
ASYNC = {"mode": "async"}


async def meet(stack: AsyncExitStack, coordinator: Coordinator, *engines: str) -> tuple[Worker, ...]:
    """A trainer and these engines, connected and not joined."""
    workers = [trainer(), *(rollout(engine) for engine in engines)]
    return tuple([await stack.enter_async_context(Worker(w, coordinator.address)) for w in workers])


async def ask(worker: Worker, request: Reconfigure) -> None:
    """Return when the coordinator has read it and not answered."""
    worker.lease.post(request)
    worker.lease.post(StatusRequest())
    assert isinstance(await worker.next(), StatusReply)


async def test_what_is_asked_for_while_an_epoch_opens_is_answered_when_the_next_one_is_live() -> None:
    async with running() as coordinator, AsyncExitStack() as stack:
        t, r, late = await meet(stack, coordinator, "e0", "e1")
        await live(t, r)
        late.join()
        for worker in (t, r):
            await worker.be_ready()
        await ask(t, Reconfigure(1, ASYNC, 5.0))
        await late.be_ready()
        for worker in (t, r, late):
            assert isinstance(await worker.next(), EpochLive)
        start = await t.next()
        assert isinstance(start, EpochStart) and start.job["mode"] == "async"
        t.lease.post(EpochReady(start.epoch))
        await together(r, late)
        assert [await t.next(), await t.next()] == [EpochLive(start.epoch), Reconfigured(1)]


async def test_nobody_waits_for_ever_for_an_epoch_that_cannot_begin() -> None:
    async with running() as coordinator, AsyncExitStack() as stack:
        t, r = await meet(stack, coordinator, "e0")
        await live(t, r)
        r.lease.abort("killed")
        assert isinstance(await t.next(), WorkerLost)
        t.lease.post(Reconfigure(1, ASYNC, 0.02))
        refused = await t.next()
        assert isinstance(refused, Reconfigured) and (refused.call, refused.error) == (1, "BarrierTimeout")
        assert "engines" in refused.missing[0] and refused.missing[0] in refused.message

        again = await stack.enter_async_context(Worker(rollout(), coordinator.address, token="restarted"))
        again.join()
        await together(t, again)
        assert t.start is not None and t.start.job["mode"] == "sync"


async def test_who_asks_while_a_rank_is_lost_is_told_at_once_and_may_ask_again_when_it_is_back() -> None:
    async with running() as coordinator, AsyncExitStack() as stack:
        first, second, r = [
            await stack.enter_async_context(Worker(w, coordinator.address))
            for w in (trainer(0, 2), trainer(1, 2), rollout())
        ]
        await live(first, second, r)
        second.lease.abort("killed")
        for worker in (first, r):
            assert isinstance(await worker.next(), WorkerLost)
        first.lease.post(Reconfigure(1, ASYNC, 3600.0))
        refused = await first.next()
        assert isinstance(refused, Reconfigured) and (refused.call, refused.error) == (1, "PeerLost")
        assert refused.message.startswith("trainer/train[1] is lost: ")
        assert refused.message.endswith("; connect it again, then reconfigure")

        back = await stack.enter_async_context(Worker(trainer(1, 2), coordinator.address, token="restarted"))
        await ask(first, Reconfigure(2, ASYNC, 0.05))  # it is on its way, and may be waited for
        late = await first.next()
        assert isinstance(late, Reconfigured) and (late.call, late.error) == (2, "BarrierTimeout")
        assert late.missing == ("trainer/train[1] (connected, has not described its weights yet)",)
        back.join()
        await together(first, back, r)
        first.lease.post(Reconfigure(3, ASYNC, 5.0))
        back.lease.post(Reconfigure(1, ASYNC, 5.0))
        await together(first, back, r)
        assert (await first.next(), await back.next()) == (Reconfigured(3), Reconfigured(1))


async def test_a_plan_that_fails_without_a_lost_engine_ends_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running() as coordinator, AsyncExitStack() as stack:
        t, r, gone = await meet(stack, coordinator, "e0", "e1")
        await live(t, r)
        gone.join()
        await together(t, r, gone)
        gone.lease.abort("killed")
        assert isinstance(await t.next(), WorkerLost)

        def fail(*_: object) -> None:
            raise PlanError("only the lost engine held it")

        monkeypatch.setattr(epochs, "build_planned", fail)
        t.lease.post(Reconfigure(1, ASYNC, 5.0))
        assert await t.next() == Reconfigured(1, "PlanError", "only the lost engine held it")


async def test_a_newcomer_is_compared_with_the_settings_to_come() -> None:
    pins = {"config": Config(mode=Mode.SYNC), "origins": {"mode": "argument"}}
    async with running() as coordinator, AsyncExitStack() as stack:
        t, r = await meet(stack, coordinator, "e0")
        await live(t, r)
        r.lease.abort("killed")
        assert isinstance(await t.next(), WorkerLost)
        await ask(t, Reconfigure(1, ASYNC, 5.0))
        with pytest.raises(ConfigError, match=r"sets mode = 'sync' \(argument\).*'async'"):
            async with Worker(rollout("e1"), coordinator.address, **pins) as insists:  # type: ignore[arg-type]
                await insists.next()
        follows = await stack.enter_async_context(Worker(rollout("e1"), coordinator.address))
        follows.join()
        with anyio.fail_after(5):
            await together(t, follows)
        assert await t.next() == Reconfigured(1)
