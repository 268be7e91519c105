"""What an apply waits for: the last copy of a version, not each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from tests.unit.session.job import running
from wbridge.device.base import Event
from wbridge.device.cpu import CpuDevice
from wbridge.flow.messages import Stopped

pytestmark = pytest.mark.anyio
NUM_GROUPS = 6
"""Of the toy model on one worker."""


@pytest.mark.parametrize("mode", ["receiver_overlap", "async"])
@pytest.mark.parametrize(("num_slots", "most_waits"), [(0, 1), (NUM_GROUPS, 1), (NUM_GROUPS - 1, 3), (1, 6)])
async def test_a_landed_version_is_waited_for_once(
    mode: str, num_slots: int, most_waits: int, tmp_path: Path
) -> None:
    """On a device that does nothing until somebody waits, so that every wait that could be shows.

    A ring one slot short needs that slot back at once, and waits for what comes into it.
    """
    device = CpuDevice(seed=5, max_held=10_000)
    waits: list[int] = []

    class Counted:
        def __init__(self, event: Event) -> None:
            self.event = event

        def is_done(self) -> bool:
            return self.event.is_done()

        async def wait(self) -> None:
            if not self.event.is_done():
                waits.append(1)
            await self.event.wait()

    options: dict[str, Any] = {"num_slots": num_slots, "devices": (None, device)}
    async with running(tmp_path, mode, num_trainers=1, engines={"engine-0": 1}, **options) as job:
        receiver = job.receivers[0]
        staging: Any = (
            receiver._rollout._engine._context.staging
        )  # of a frozen context; one method is watched
        assert len(receiver._rollout._engine._groups) == NUM_GROUPS
        scatter = staging.scatter
        staging.scatter = lambda *args, **options: Counted(scatter(*args, **options))

        async def poll_when_held() -> None:
            while not receiver._rollout._lockstep.follower.flag:
                await anyio.sleep(0.001)
            await job.take()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(job.send, 1)
            await poll_when_held()
        assert job.holds(1)
        assert 1 <= len(waits) <= most_waits
    device.close()


async def test_what_a_writer_stops_before_is_not_exposed_any_longer(tmp_path: Path) -> None:
    """Its `Stopped` may come before the abort; the table of exposures is small."""
    async with running(tmp_path, "async", num_trainers=2, transport="shared_memory") as job:
        rollout = job.receivers[0]._rollout
        engine, transport = rollout._engine, rollout._worker.transports._shared_memory

        async def stop_before_the_abort() -> None:
            for ticket in (1001, 1002):
                engine.serve(ticket)
                assert engine._exposed.keys
                for trainer in job.trainers:
                    engine.stopped(str(trainer.source.worker), Stopped(ticket, -1))
                engine.abort(ticket, "for the test")
            while engine._exposed.keys:
                await anyio.sleep(0.001)

        with anyio.fail_after(5):
            await anyio.to_thread.run_sync(rollout._worker.loop.submit(stop_before_the_abort).finished.result)
        assert not engine._exposed._slots
        assert not transport._exposed
        assert set(engine._ring.states) == {"free"}
