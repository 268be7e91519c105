"""What a call of a trainer or of an engine waited for while another engine sleeps: nothing of that engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import anyio

import wbridge
from tests.faults.world import World
from wbridge.testing.causes import run_causal, waited

NAP_S, STEP_S, TRAIN_S = 0.8, 0.05, 0.1
NUM_ROUNDS, BURST = 3, 3
SLEEPER = "engine-1"


class Waited(NamedTuple):
    who: str
    took_s: float
    owners: list[str]

    @property
    def ended_with_the_sleeper(self) -> bool:
        return any(SLEEPER in owner for owner in self.owners)


class Log:
    """Every send of a trainer and every poll that applied on an engine that is awake."""

    def __init__(self) -> None:
        self.sends: list[list[Waited]] = []
        self.polls: list[Waited] = []
        self.num_naps = 0

    async def measure(self, who: str, call: Callable[[], Awaitable[Any]]) -> tuple[Any, Waited]:
        begun_s = anyio.current_time()
        result, owners = await waited(call)
        return result, Waited(who, anyio.current_time() - begun_s, owners)


def play(path: Path, mode: str, nap_s: float, **config: object) -> Log:
    """Bursts of three versions; engine-1 sleeps after each update."""
    log = Log()

    async def roll(world: World, index: int) -> None:
        receiver, rollout = world.receivers[index], world.rollouts[index]
        is_sleeper = rollout.engine == SLEEPER
        while True:
            await anyio.sleep(STEP_S)
            update, wait = await log.measure(f"{rollout.engine}[{rollout.rank}]", receiver.poll_requests)
            if isinstance(update, wbridge.Update):
                if is_sleeper:
                    log.num_naps += 1
                    await anyio.sleep(nap_s)
                else:
                    log.polls.append(wait)

    async def train(world: World, rank: int) -> None:
        sender, version = world.senders[rank], 0
        for _ in range(NUM_ROUNDS):
            burst = []
            for _ in range(BURST):
                version += 1
                world.trainers[rank].set_version(version)
                await anyio.sleep(TRAIN_S)
                _, wait = await log.measure(f"trainer[{rank}]", lambda v=version: sender.send_weights(v))  # type: ignore[misc]  # a lambda with a default
                burst.append(wait)
            log.sends.append(burst)
            await anyio.sleep(2 * NAP_S)

    async def main() -> None:
        world = World(path, mode, **config)
        await world.connect()
        async with anyio.create_task_group() as rollouts:
            for index in range(len(world.receivers)):
                rollouts.start_soon(roll, world, index)
            async with anyio.create_task_group() as trainers:
                for rank in range(len(world.senders)):
                    trainers.start_soon(train, world, rank)
            rollouts.cancel_scope.cancel()
        await world.close(world.adapters)

    run_causal(main)
    assert len(log.sends) == 2 * NUM_ROUNDS
    assert len(log.polls) >= 2 * NUM_ROUNDS
    return log


def test_no_wait_ends_with_an_event_of_an_engine_that_sleeps(tmp_path: Path) -> None:
    asleep, awake = (play(tmp_path, "async", nap_s, delivery="latest") for nap_s in (NAP_S, 0.0))
    waits = [*asleep.polls, *(wait for burst in asleep.sends for wait in burst)]
    assert asleep.num_naps >= NUM_ROUNDS
    assert all(any(wait.owners) for wait in waits)  # each went through somebody
    assert [wait for wait in waits if wait.ended_with_the_sleeper] == []
    for log in (asleep, awake):
        assert max(poll.took_s for poll in log.polls) < 0.02
        assert max(burst[-1].took_s for burst in log.sends) < 0.02


def test_with_every_version_for_every_engine_they_do(tmp_path: Path) -> None:
    log = play(tmp_path, "sync", NAP_S)
    assert any(wait.ended_with_the_sleeper for burst in log.sends for wait in burst)
