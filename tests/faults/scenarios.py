"""What the users of a job do, so that between them every await of the product is reached."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping

import anyio

from tests.faults.world import World
from tests.unit.session.job import rendezvous
from wbridge.config import Config
from wbridge.control.client import request_status
from wbridge.control.rendezvous import parse_rendezvous
from wbridge.flow.messages import Alive

Scenario = Callable[[World], Awaitable[None]]


async def updates(world: World) -> None:
    """Two versions, with steps around them, then everybody leaves."""
    await world.connect()
    for _ in range(2):
        outcomes = await world.update()
        if all(outcome.error is None for outcome in outcomes):  # else somebody has to be restarted first
            for outcome in outcomes[: len(world.senders)]:
                await world.attempt("landed", outcome.value.landed)
                await world.attempt("applied", outcome.value.applied)
        await world.check_weights()
    await world.close(world.adapters)


async def idling(world: World) -> None:
    """Polls that find nothing, a user who only follows updates, a look at the status."""
    await world.connect()
    await world.all([*world.polls(wait_s=0.5)])
    await world.all([("idle poll", receiver.poll_requests) for receiver in world.receivers])
    world.train()
    sends = [await world.start(name, call) for name, call in world.sends()]
    await asyncio.sleep(0.1)  # the engines are asked to meet
    await world.all([("poll", receiver.poll_requests) for receiver in world.receivers])
    await world.all(world.polls(wait_s=2.0))
    for send in sends:
        await asyncio.wait({send})
    await world.settle()
    where = parse_rendezvous(rendezvous(world.path), {})
    await world.attempt("status", lambda: request_status(where, Config(connect_timeout_s=2.0)))

    async def follow(index: int) -> None:
        with anyio.move_on_after(20.0):
            async for _ in world.receivers[index].updates():
                return

    world.train()
    follows = [(f"follow {i}", functools.partial(follow, i)) for i in range(len(world.receivers))]
    await world.all([*world.sends(), *follows])
    await anyio.sleep(10.0)  # the heartbeats


async def aborts(world: World) -> None:
    """A send that is cancelled before it is announced, one after it, and a delivery that is aborted."""
    await world.connect()
    world.train()
    (first,) = [await world.start(name, call) for name, call in world.sends(0)]
    await asyncio.sleep(0.3)
    first.cancel()
    await world.all(world.sends(1))
    world.train()
    calls = [await world.start(name, call) for name, call in world.sends()]
    polls = [await world.start(name, call) for name, call in world.polls(wait_s=3.0)]
    await asyncio.sleep(0.3)
    for call in calls:
        call.cancel()
    await world.settle()
    del polls
    world.train()
    calls = [await world.start(name, call) for name, call in world.sends()]
    await asyncio.sleep(0.3)
    for call in calls:
        if call.done() and not call.cancelled() and call.exception() is None:
            await world.attempt("abort", call.result().abort)
    await world.all(world.polls(wait_s=0.5))
    for call in calls:
        call.cancel()
    await world.settle()


async def losses(world: World) -> None:
    """An engine leaves while a version is on its way to it; then the coordinator goes, and comes back."""
    await world.connect()
    world.train()
    sends = [await world.start(name, call) for name, call in world.sends()]
    polls = [await world.start(name, call) for name, call in world.polls(0, 2)]
    await asyncio.sleep(0.003)
    await world.close([world.receivers[1]])
    for call in (*sends, *polls):
        await asyncio.wait({call})
    await world.settle()
    await world.restart((), ["engine-0"])
    await world.update()
    await world.close([world.senders[0]])
    await asyncio.sleep(0.5)
    await world.all(world.sends(1))
    await world.restart([0], ())
    await world.update()


async def refusals(world: World) -> None:
    """A server that is busy, a poll that is cancelled while parked, a worker that never polls."""
    await world.connect()
    world.hooks[0].refuses = 1
    world.train()
    await world.all([*world.sends(), *world.polls(wait_s=2.0)])
    world.train()
    sends = [await world.start(name, call) for name, call in world.sends()]
    parked = [await world.start(name, call) for name, call in world.polls(0)]
    await asyncio.sleep(1.0)
    for call in parked:
        call.cancel()
    for call in sends:
        await asyncio.wait({call})
    await world.settle()


async def absences(world: World) -> None:
    """A job that stays incomplete, and strangers who may not join it: everybody is told why."""
    connecting = [await world.start("connect", adapter.connect) for adapter in world.adapters[:-1]]
    for more in ({"slot_nbytes": 4096}, {"mode": "sync"}):
        stranger = world.stranger(**more)
        await world.connect([stranger])
        await world.close([stranger])
    for call in connecting:
        await asyncio.wait({call})
    await world.settle()

    async def visit() -> None:
        async with world.senders[0]:
            pass
        async with world.receivers[0]:
            pass

    await world.attempt("visit", visit)


async def latecomers(world: World) -> None:
    """An engine leaves and comes back while the other one holds a grant; the coordinator stays away."""
    await world.connect()
    await world.restart((), ["engine-1"])
    world.train()
    sends = [await world.start(name, call) for name, call in world.sends()]
    polls = [await world.start(name, call) for name, call in world.polls(0)]
    await asyncio.sleep(0.2)
    await world.restart((), ["engine-1"])
    for call in (*sends, *polls):
        await asyncio.wait({call})
    await world.settle()
    world.train()
    sends = [await world.start(name, call) for name, call in world.sends()]
    polls = [await world.start(name, call) for name, call in world.polls()]
    await asyncio.sleep(0.004)
    await world.close([world.senders[0]])
    await asyncio.sleep(8.0)
    for call in (*sends, *polls):
        await asyncio.wait({call})
    await world.settle()


async def changes(world: World) -> None:
    """Another mode in a new epoch, a comparison of the weights, and parameters that are bound again."""
    await world.connect()
    await world.update()
    await world.all(
        [
            *[("change", functools.partial(s.reconfigure, mode="async")) for s in world.senders],
            *world.polls(wait_s=2.0),
        ]
    )
    await world.update()
    await world.all([*[("verify", s.verify) for s in world.senders], *world.polls(wait_s=2.0)])
    await world.all([("rebind", receiver.rebind) for receiver in world.receivers])
    await world.update()


async def silences(world: World) -> None:
    """One engine takes the credits of the others and says nothing any more: they turn to the trainers."""
    await world.connect()
    engine = world.receivers[1]._rollout._engine
    if engine is not None and (member := engine._exchange) is not None:
        tell = member._tell
        member.relay.credit = lambda *_: None
        member._tell = lambda to, message: None if isinstance(message, Alive) else tell(to, message)
    await world.update()
    await world.check_weights()


SCENARIOS: Mapping[str, tuple[Scenario, dict[str, object]]] = {
    "updates sync": (updates, {"mode": "sync"}),
    "updates sender_overlap": (updates, {"mode": "sender_overlap"}),
    "updates receiver_overlap": (updates, {"mode": "receiver_overlap"}),
    "updates async": (updates, {"mode": "async"}),
    "checked sync": (updates, {"mode": "sync", "debug_source": True, "checksum": "off"}),
    "checked async": (updates, {"mode": "async", "debug_source": True, "delivery": "every"}),
    "idling": (idling, {"mode": "sync"}),
    "aborts sync": (aborts, {"mode": "sync"}),
    "aborts async": (aborts, {"mode": "async"}),
    "slow aborts sync": (aborts, {"mode": "sync", "delay_s": 0.2}),
    "slow aborts async": (aborts, {"mode": "async", "delay_s": 0.2}),
    "losses sync": (losses, {"mode": "sync"}),
    "slow losses async": (losses, {"mode": "async", "delay_s": 0.2}),
    "refusals": (refusals, {"mode": "sync"}),
    "absences": (absences, {"mode": "async"}),
    "latecomers sync": (latecomers, {"mode": "sync", "delay_s": 0.1}),
    "latecomers async": (latecomers, {"mode": "async"}),
    "changes": (changes, {"mode": "sync"}),
    "relays sync": (updates, {"mode": "sync", "engines": (1, 1, 1), "apart": True}),
    "relays async": (updates, {"mode": "async", "engines": (1, 1, 1), "apart": True, "delay_s": 0.2}),
    "relay losses": (losses, {"mode": "async", "engines": (1, 1, 1), "apart": True, "delay_s": 0.2}),
    "silent relay": (silences, {"mode": "async", "engines": (1, 1, 1), "apart": True}),
}
