"""Steps beside a poll in one event loop."""

from __future__ import annotations

from pathlib import Path

import anyio.lowlevel
import pytest

from tests.unit.session.job import gather, running
from wbridge.errors import ProtocolError

pytestmark = pytest.mark.anyio


async def test_a_blocking_step_in_the_loop_that_applies_is_refused(tmp_path: Path) -> None:
    """It would wait for the poll, and the poll for the loop that it blocks."""
    async with running(tmp_path, "sync", num_trainers=1, engines={"engine-0": 1}) as job:
        receiver = job.receivers[0]

        async def step() -> None:
            while not receiver._rollout.gate._closed:
                await anyio.lowlevel.checkpoint()
            with pytest.raises(ProtocolError, match="async with"), receiver.step():
                pass
            async with receiver.step() as version:
                assert version == 1

        await gather(lambda: job.send(1), lambda: job.take(0), step)
