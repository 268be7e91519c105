"""Sessions between real processes, and peers that are killed, asked to end, or forked."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import wbridge.sync
from tests.models.toy import Rollout, Trainer
from tests.process.scripts import PRELUDE, heard, process, tell
from tests.unit.session.job import MODES, PATIENCE_S, rendezvous, settings, together

pytestmark = [pytest.mark.process, pytest.mark.timeout(60)]

TRAINER = """
rank, transport = int(sys.argv[3]), sys.argv[4]
for mode in mode.split(","):
    trainer = Trainer(rank, 2)
    values = config(mode, 1, transport)
    with wbridge.sync.SenderAdapter(trainer.source, rendezvous=url + mode, config=values) as sender:
        sender.connect()
        for version in (1, 2, 3):
            trainer.set_version(version)
            delivery = sender.send_weights(version, {"step": version})
            for parameter in trainer.parameters.values():
                parameter.fill_(-7.0)
            assert delivery.applied() == {"engine-0": "applied"}
        say(mode, sender.counters["put_nbytes"])  # and closes together with the rollout
"""

ENGINE = """
rollout = Rollout("victim")
with wbridge.sync.ReceiverAdapter(rollout.target, rendezvous=url, config=config(mode, 2)) as receiver:
    receiver.connect()
    say("connected")
    if mode == "async":
        sys.stdin.read()
    while True:
        if update := receiver.poll_requests(wait_s=60.0):
            say("applied", update.version, rollout.holds(update.version))
"""

POLITE_ENGINE = """
import signal, anyio
async def main():
    async with anyio.create_task_group() as tasks:
        async def leave_when_told():
            with anyio.open_signal_receiver(signal.SIGTERM) as signals:
                async for _ in signals:
                    tasks.cancel_scope.cancel()
        tasks.start_soon(leave_when_told)
        target = Rollout("victim").target
        async with wbridge.ReceiverAdapter(target, rendezvous=url, config=config(mode, 2)) as receiver:
            await receiver.connect()
            say("connected")
            async for update in receiver.updates():
                say("applied", update.version)
anyio.run(main)
say("left")
"""

LONE_TRAINER = """
trainer = Trainer()
with wbridge.sync.SenderAdapter(trainer.source, rendezvous=url, config=config(mode, 2)) as sender:
    sender.connect()
    for line in sys.stdin:
        trainer.set_version(int(line))
        sender.send_weights(int(line))
        say("sent", int(line))
"""

FORK = """
import os
from concurrent.futures import ThreadPoolExecutor
from wbridge.errors import EndpointClosed
trainer, rollout = Trainer(), Rollout()
values = settings(mode, 1)
with (
    wbridge.sync.SenderAdapter(trainer.source, rendezvous=url, config=values) as sender,
    wbridge.sync.ReceiverAdapter(rollout.target, rendezvous=url, config=values) as receiver,
):
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda adapter: adapter.connect(), (sender, receiver)))
    def update(version):
        trainer.set_version(version)
        sender.send_weights(version)
        assert receiver.poll_requests(wait_s=20.0).version == version
        assert rollout.holds(version)
    update(1)
    child = os.fork()
    if child == 0:
        num_raised = 0
        def wait():
            receiver.poll_requests(wait_s=1.0)
        for call in (lambda: sender.send_weights(2), receiver.poll_requests, wait):
            try:
                call()
            except EndpointClosed as exc:
                num_raised += "does not survive fork()" in str(exc)
        sender.close()
        receiver.close()
        os._exit(10 + num_raised)
    _, status = os.waitpid(child, 0)
    update(2)
    say("child", os.waitstatus_to_exitcode(status))
"""

UNCLOSED = (
    PRELUDE
    + """
from tests.unit.session.job import together
trainer, rollout = Trainer(), Rollout()
sender = wbridge.sync.SenderAdapter(trainer.source, rendezvous=url, config=config(mode, 1, sys.argv[3]))
receiver = wbridge.sync.ReceiverAdapter(rollout.target, rendezvous=url, config=config(mode, 1, sys.argv[3]))
together(sender.connect, receiver.connect)
together(lambda: sender.send_weights(1), lambda: receiver.poll_requests(wait_s=20.0))
say(receiver.version)
"""
)


def values(mode: str, num_engines: int, transport: str = "auto") -> dict[str, object]:
    return settings(mode, num_engines, transport=transport, relay_patience_s=0.05)


@pytest.mark.parametrize("transport", ["shared_memory", "ucxx"])
def test_whole_versions_arrive_between_processes_in_every_mode(transport: str, tmp_path: Path) -> None:
    url, modes = rendezvous(tmp_path), ",".join(MODES)
    with (
        process(TRAINER, url, modes, "0", transport) as first,
        process(TRAINER, url, modes, "1", transport) as second,
    ):
        for mode in MODES:
            rollout = Rollout("engine-0")
            with wbridge.sync.ReceiverAdapter(
                rollout.target, rendezvous=url + mode, config=values(mode, 1, transport)
            ) as receiver:
                receiver.connect()
                for version in (1, 2, 3):
                    update = receiver.poll_requests(wait_s=PATIENCE_S)
                    assert update is not None
                    assert (update.version, update.metadata) == (version, {"step": version})
                    assert rollout.holds(version)
                sent = [heard(first).split(), heard(second).split()]
            needed = 3 * sum(4 * tensor.numel() for tensor in rollout.parameters.values())
            assert [words[0] for words in sent] == [mode] * 2
            assert 1.00 <= sum(int(words[1]) for words in sent) / needed <= 1.01
        assert first.wait(PATIENCE_S) == second.wait(PATIENCE_S) == 0


@pytest.mark.parametrize(("mode", "stop"), [("async", signal.SIGKILL), ("sync", signal.SIGTERM)])
def test_an_engine_that_is_killed_is_lost_and_the_others_go_on(
    mode: str, stop: signal.Signals, tmp_path: Path
) -> None:
    """In the middle of an update: landed there and not applied (async), or parked for it (sync)."""
    trainer, rollout, url = Trainer(), Rollout("survivor"), rendezvous(tmp_path)
    with (
        process(ENGINE, url, mode) as victim,
        wbridge.sync.SenderAdapter(trainer.source, rendezvous=url, config=values(mode, 2)) as sender,
        wbridge.sync.ReceiverAdapter(rollout.target, rendezvous=url, config=values(mode, 2)) as receiver,
    ):
        together(sender.connect, receiver.connect)
        assert heard(victim) == "connected"
        trainer.set_version(1)
        if mode == "async":
            first = sender.send_weights(1)
            assert first.landed() == {"survivor": "landed", "victim": "landed"}
            victim.send_signal(stop)
            receiver.poll_requests(wait_s=PATIENCE_S)
        else:
            sending = threading.Thread(target=sender.send_weights, args=(1,))
            sending.start()
            assert heard(victim) == "applied 1 True"  # and the send still waits for the other engine
            victim.send_signal(stop)
            receiver.poll_requests(wait_s=PATIENCE_S)
            sending.join()
        assert victim.wait(PATIENCE_S) == -stop
        assert rollout.holds(1)
        for version in (2, 3):
            trainer.set_version(version)
            delivery, update = together(
                lambda v=version: sender.send_weights(v), lambda: receiver.poll_requests(wait_s=PATIENCE_S)
            )
            assert update.version == version
            assert delivery.applied() == {"survivor": "applied", "victim": "lost"}
            assert rollout.holds(version)


def test_an_application_may_turn_sigterm_into_a_clean_end(tmp_path: Path) -> None:
    trainer, rollout, url = Trainer(), Rollout("survivor"), rendezvous(tmp_path)
    with (
        process(POLITE_ENGINE, url, "async") as victim,
        wbridge.sync.SenderAdapter(trainer.source, rendezvous=url, config=values("async", 2)) as sender,
        wbridge.sync.ReceiverAdapter(rollout.target, rendezvous=url, config=values("async", 2)) as receiver,
    ):
        together(sender.connect, receiver.connect)
        assert heard(victim) == "connected"
        first = sender.send_weights(1)
        assert heard(victim) == "applied 1"
        victim.terminate()
        assert heard(victim) == "left"
        assert victim.wait(PATIENCE_S) == 0
        receiver.poll_requests(wait_s=PATIENCE_S)
        assert first.applied() == {"survivor": "applied", "victim": "applied"}
        assert sender.send_weights(2).landed()["victim"] == "lost"


class Told:
    """Hooks that tell when a poll is parked, and when it has been let go."""

    def __init__(self) -> None:
        self.asked, self.released = threading.Event(), threading.Event()

    def before_apply(self) -> None:
        self.asked.set()

    def after_apply(self, update: wbridge.Update | None) -> None:
        if update is None:
            self.released.set()
        else:
            self.asked.clear()


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_engines_keep_serving_when_the_trainer_is_killed(mode: str, tmp_path: Path) -> None:
    """Also one whose poll is parked for an update that will never come."""
    url, hooks = rendezvous(tmp_path), Told()
    rollouts = [Rollout("engine-0"), Rollout("engine-1")]
    config = settings(mode, 2, transport="auto")
    with (
        process(LONE_TRAINER, url, mode) as trainer,
        wbridge.sync.ReceiverAdapter(rollouts[0].target, rendezvous=url, config=config, hooks=hooks) as first,
        wbridge.sync.ReceiverAdapter(rollouts[1].target, rendezvous=url, config=config) as second,
    ):
        together(first.connect, second.connect)
        tell(trainer, "1")
        together(*[lambda r=r: r.poll_requests(wait_s=PATIENCE_S) for r in (first, second)])
        assert heard(trainer) == "sent 1"
        if mode == "sync":
            tell(trainer, "2")

            def roll() -> None:
                while not hooks.released.is_set():
                    assert first.poll_requests() is None

            rolling = threading.Thread(target=roll)
            rolling.start()
            assert hooks.asked.wait(PATIENCE_S)
            trainer.kill()
            assert hooks.released.wait(PATIENCE_S)
            rolling.join()
        trainer.kill()
        trainer.wait(PATIENCE_S)
        for _ in range(100):
            assert first.poll_requests() is None
            assert second.poll_requests() is None
        for receiver, rollout in ((first, rollouts[0]), (second, rollouts[1])):
            with receiver.step() as version:
                assert version == 1
                assert rollout.holds(1)


def test_a_fork_cannot_use_its_parents_adapters(tmp_path: Path) -> None:
    """The child raises and closes at once; the parent goes on."""
    with process(FORK, rendezvous(tmp_path), "async") as parent:
        assert heard(parent) == "child 13"
        assert parent.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("transport", ["shared_memory", "ucxx"])
def test_a_program_that_closes_nothing_ends_without_a_word(transport: str, tmp_path: Path) -> None:
    arguments = (rendezvous(tmp_path), "async", transport)
    command = [sys.executable, "-c", UNCLOSED, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "1\n", "")
