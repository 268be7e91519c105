"""What users may do at any moment, and what the others see of it, under virtual time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.world import Leaks, World
from wbridge.errors import UpdateAborted
from wbridge.testing.clock import run_virtual


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def play(path: Path, mode: str, act: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        leaks = Leaks()
        world = World(path, mode)
        await world.connect()
        await act(world)
        await world.recover()
        await world.finish()
        device = world.device
        del world
        leaks.check(device)

    run_virtual(main)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_send_cancelled_before_it_has_begun_is_withdrawn_for_all(mode: str, tmp_path: Path) -> None:
    async def act(world: World) -> None:
        world.train()
        (call,) = [await world.start(name, send) for name, send in world.sends(0)]
        call.cancel()
        (outcome,) = await world.all(world.sends(1))
        if not isinstance(outcome.error, UpdateAborted):  # pinned: the snapshot is taken, the send is over
            with pytest.raises(UpdateAborted, match="rank 0 cancelled"):
                await outcome.value.landed()

    play(tmp_path, mode, act)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_trainer_whose_engines_have_all_left_serves_those_that_come(mode: str, tmp_path: Path) -> None:
    async def act(world: World) -> None:
        await world.update()
        await world.close(world.receivers)
        await asyncio.sleep(1.0)
        await world.update(wait_s=0.1)
        await world.restart((), ["engine-0", "engine-1"])

    play(tmp_path, mode, act)
