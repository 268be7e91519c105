"""Memory comes from threads: bringing in that of a large model takes longer than a lease lasts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.session.job import MODES, running
from wbridge.device.memory import ForeignMemory, HostMemory

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("transport", ["loopback", "shared_memory"])
async def test_no_loop_waits_for_memory(
    mode: str, transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_loop: list[bool] = []
    for kind in (HostMemory, ForeignMemory):

        def watch(
            self: object, *args: Any, take: Callable[..., None] = kind.__init__, **options: Any
        ) -> None:
            in_loop.append(asyncio._get_running_loop() is not None)
            take(self, *args, **options)

        monkeypatch.setattr(kind, "__init__", watch)
    async with running(tmp_path, mode, transport=transport) as job:
        await job.update(1)
        assert job.holds(1)
    assert in_loop
    assert not any(in_loop)
