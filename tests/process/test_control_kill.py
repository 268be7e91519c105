"""The coordinator's process, and a worker's, are killed: the others notice at once and go on."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import anyio
import pytest

from tests.unit.control.job import Worker, live, rollout, running, together, trainer
from wbridge.config import Config
from wbridge.control.client import connect_coordinator
from wbridge.control.connection import Connection
from wbridge.control.messages import Welcome, WorkerLost
from wbridge.control.rendezvous import FileRendezvous, look_up
from wbridge.errors import PeerLost

pytestmark = [pytest.mark.anyio, pytest.mark.process]
ROOT = Path(__file__).parents[2]

COORDINATOR = """
import sys, anyio
from wbridge.config import Config
from wbridge.control.coordinator import Coordinator
from wbridge.control.rendezvous import Meeting, choose_secret, parse_rendezvous, publish

async def main():
    place = parse_rendezvous(sys.argv[1], {})
    secret = choose_secret(place, b"")
    coordinator = Coordinator(Config(), secret=secret)
    async with anyio.create_task_group() as tasks:
        publish(place, Meeting(await tasks.start(coordinator.serve), secret))

anyio.run(main)
"""

ENGINE = """
import sys, anyio
from tests.unit.control.job import Worker, rollout

async def main():
    async with Worker(rollout("victim"), sys.argv[1]) as worker:
        worker.join()
        while True:
            await worker.go_live()

anyio.run(main)
"""


@contextmanager
def process(script: str, argument: str) -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen([sys.executable, "-c", script, argument], cwd=ROOT)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


async def connect(place: FileRendezvous) -> tuple[Connection, Welcome]:
    return await connect_coordinator(
        place, trainer(), Config(connect_timeout_s=30.0), explicit={}, host="host", adapter_token="token"
    )


async def test_a_killed_coordinator_is_noticed_and_its_successor_found(tmp_path: Path) -> None:
    place = FileRendezvous(str(tmp_path / "job"))
    url = f"file://{place.path}"
    with process(COORDINATOR, url) as first:
        connection, welcome = await connect(place)
        async with connection:
            first.send_signal(signal.SIGKILL)
            with anyio.fail_after(10), pytest.raises(PeerLost):
                await connection.receive()
    stale = look_up(place, b"")
    with process(COORDINATOR, url):
        connection, successor = await connect(place)
        async with connection:
            assert successor.incarnation != welcome.incarnation
    assert look_up(place, b"") != stale


async def test_a_killed_worker_is_noticed_and_the_others_go_on() -> None:
    async with running() as coordinator, AsyncExitStack() as stack:
        t, r = [
            await stack.enter_async_context(Worker(w, coordinator.address)) for w in (trainer(), rollout())
        ]
        await live(t, r)
        with process(ENGINE, coordinator.address) as victim:
            await together(t, r)
            victim.send_signal(signal.SIGKILL)
            for worker in (t, r):
                with anyio.fail_after(10):
                    lost = await worker.next()
                assert isinstance(lost, WorkerLost)
                assert lost.worker == rollout("victim")
        with process(ENGINE, coordinator.address):
            await together(t, r)
            assert t.start is not None
            assert t.start.engines == ("e0", "victim")
