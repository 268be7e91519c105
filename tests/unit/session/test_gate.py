"""Steps beside a poll in one event loop."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import wbridge
from tests.unit.session.job import gather, running
from wbridge.errors import ProtocolError

pytestmark = pytest.mark.anyio


async def test_a_blocking_step_in_the_loop_that_applies_is_refused(tmp_path: Path) -> None:
    """It would wait for the poll, and the poll for the loop that it blocks."""
    refused = []

    def step() -> None:
        with pytest.raises(ProtocolError, match="async with"), job.receivers[0].step():
            pass
        refused.append(True)

    def retarget(index: int, target: wbridge.Target) -> wbridge.Target:
        return msgspec.structs.replace(target, after_apply=step)  # in the middle of the apply

    async with running(tmp_path, "sync", num_trainers=1, engines={"engine-0": 1}, retarget=retarget) as job:
        await gather(lambda: job.send(1), lambda: job.take(0))
        async with job.receivers[0].step() as version:
            assert version == 1
        assert refused == [True]
