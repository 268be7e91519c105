"""Engines of two and of four ranks, each a process on a host of its own, that take one copy together."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.unit.session.job import rendezvous

pytest.importorskip("ucxx", reason="hosts that are pretended are reached through ucxx")
pytestmark = [pytest.mark.process, pytest.mark.timeout(90)]
ROOT = Path(__file__).parents[2]

PRELUDE = """
import sys, anyio, torch, wbridge
torch.set_num_threads(1)
from tests.models.toy import Rollout, Trainer
from tests.unit.session.job import gather, settings
url, host = sys.argv[1:3]
config = settings("sync", 2, transport="auto", relay_patience_s=20.0, slot_nbytes=2048) | {"host": host}
"""

TRAINER = """
async def main():
    trainer = Trainer(0, 1)
    async with wbridge.SenderAdapter(trainer.source, rendezvous=url, config=config) as sender:
        await sender.connect()
        for version in (1, 2, 3):
            trainer.set_version(version)
            delivery = await sender.send_weights(version)
            assert await delivery.applied() == {"pair": "applied", "four": "applied"}
        print(sender.counters["put_nbytes"], flush=True)
anyio.run(main)
"""

ENGINE = """
from contextlib import AsyncExitStack
async def main():
    size = int(sys.argv[3])
    rollouts = [Rollout(host, rank, size) for rank in range(size)]
    async with AsyncExitStack() as stack:
        receivers = [
            await stack.enter_async_context(wbridge.ReceiverAdapter(r.target, rendezvous=url, config=config))
            for r in rollouts
        ]
        await gather(*[receiver.connect for receiver in receivers])
        for version in (1, 2, 3):
            polls = [lambda r=r: r.poll_requests(wait_s=30.0) for r in receivers]
            updates = await gather(*polls)
            assert [update.version for update in updates] == [version] * size
            assert all(rollout.holds(version) for rollout in rollouts)
        print(*[r.counters["received_nbytes"] for r in receivers], flush=True)
        sys.stdin.read()
anyio.run(main)
"""

COPY_NBYTES = 11_140
"""Of the toy model."""


def test_engines_of_two_and_four_ranks_take_one_copy_from_the_trainer(tmp_path: Path) -> None:
    with ExitStack() as stack:

        def start(program: str, *arguments: str) -> subprocess.Popen[str]:
            command = [sys.executable, "-c", PRELUDE + program, rendezvous(tmp_path), *arguments]
            process = subprocess.Popen(
                command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        trainer, *engines = start(TRAINER, "trainers"), start(ENGINE, "pair", "2"), start(ENGINE, "four", "4")
        assert trainer.stdout is not None
        sent = int(trainer.stdout.readline())
        assert 3 * COPY_NBYTES <= sent <= 1.01 * 3 * COPY_NBYTES
        for engine in engines:
            assert engine.stdout is not None and engine.stdin is not None
            received = list(map(int, engine.stdout.readline().split()))
            assert sum(received) > 3 * COPY_NBYTES  # what all ranks need, each has
            engine.stdin.close()
        assert [process.wait(20) for process in (trainer, *engines)] == [0, 0, 0]
