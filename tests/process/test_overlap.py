"""Transfers go on while the application keeps its own thread busy, in whatever way."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import wbridge.sync
from tests.models.toy import Rollout, Trainer
from tests.process.scripts import heard, process, tell
from tests.process.test_session_processes import values
from tests.unit.session.job import PATIENCE_S, rendezvous

pytestmark = [pytest.mark.process, pytest.mark.timeout(60)]

COMPUTE = """
import ctypes, threading
def compute(kind):
    "Keep this thread busy until told."
    say("computing")
    if kind == "C code":
        sys.stdin.readline()
    elif kind == "C code with the GIL":
        ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(64), 64)
    else:
        told = []
        threading.Thread(target=lambda: told.append(sys.stdin.readline())).start()
        while not told:
            sum(range(100))
    say("awake")
"""

TRAINER = (
    COMPUTE
    + """
trainer = Trainer()
with wbridge.sync.SenderAdapter(trainer.source, rendezvous=url, config=config(mode, 1)) as sender:
    sender.connect()
    trainer.set_version(1)
    delivery = sender.send_weights(1)
    compute(sys.argv[3])
    say(delivery.applied())
"""
)

ENGINE = (
    COMPUTE
    + """
rollout = Rollout()
with wbridge.sync.ReceiverAdapter(rollout.target, rendezvous=url, config=config(mode, 1)) as receiver:
    receiver.connect()
    compute(sys.argv[3])
    update = receiver.poll_requests(wait_s=20.0)
    say(update.version, rollout.holds(1))
"""
)

FREE = ["C code", "Python"]


@pytest.mark.parametrize("kind", FREE)
@pytest.mark.parametrize("mode", ["sender_overlap"])
def test_a_snapshot_is_delivered_while_the_trainer_computes(mode: str, kind: str, tmp_path: Path) -> None:
    rollout, url = Rollout(), rendezvous(tmp_path)
    with (
        process(TRAINER, url, mode, kind) as trainer,
        wbridge.sync.ReceiverAdapter(rollout.target, rendezvous=url, config=values(mode, 1)) as receiver,
    ):
        receiver.connect()
        assert heard(trainer) == "computing"
        update = receiver.poll_requests(wait_s=PATIENCE_S)
        assert update is not None
        assert rollout.holds(1)
        tell(trainer, "go on")
        assert [heard(trainer), heard(trainer)] == ["awake", "{'engine-0': 'applied'}"]


@pytest.mark.parametrize("kind", FREE)
@pytest.mark.parametrize(("mode", "transport"), [("receiver_overlap", "auto"), ("async", "ucxx")])
def test_a_version_lands_while_the_rollout_computes(
    mode: str, kind: str, transport: str, tmp_path: Path
) -> None:
    trainer, url = Trainer(), rendezvous(tmp_path)
    config = values(mode, 1) | {"transport": transport}
    with (
        process(ENGINE, url, mode, kind) as engine,
        wbridge.sync.SenderAdapter(trainer.source, rendezvous=url, config=config) as sender,
    ):
        sender.connect()
        assert heard(engine) == "computing"
        trainer.set_version(1)
        assert sender.send_weights(1).landed() == {"engine-0": "landed"}
        tell(engine, "go on")
        assert [heard(engine), heard(engine)] == ["awake", "1 True"]


def test_bytes_land_in_shared_memory_while_the_rollout_holds_the_gil(tmp_path: Path) -> None:
    """With its credits given, nothing of the receiver has to run. The grant itself needs its loop."""
    trainer, rollout, url = Trainer(), Rollout(), rendezvous(tmp_path)
    needed = sum(4 * tensor.numel() for tensor in rollout.parameters.values())
    with (
        process(ENGINE.replace("compute(sys.argv[3])", HOLD_AFTER_CREDITS), url, "async") as engine,
        wbridge.sync.SenderAdapter(trainer.source, rendezvous=url, config=values("async", 1)) as sender,
    ):
        sender.connect()
        assert heard(engine) == "connected"
        trainer.set_version(1)
        delivery = sender.send_weights(1)
        assert heard(engine) == "computing"
        until_s = time.monotonic() + PATIENCE_S
        while sender.counters["put_nbytes"] < needed and time.monotonic() < until_s:
            time.sleep(0.001)
        assert sender.counters["put_nbytes"] == needed
        assert delivery.outcomes == {}, "the rollout has not said so yet"
        tell(engine, "go on")
        assert delivery.landed()["engine-0"] in ("landed", "applied")  # it may be quick now
        assert [heard(engine), heard(engine)] == ["awake", "1 True"]


HOLD_AFTER_CREDITS = """
    # The loop thread gives the last credit, and does not run again until told.
    engine = receiver._rollout._engine
    left = sum(len(group.pieces) for group in engine._groups)
    endpoint_type = type(next(iter(engine._context.endpoints.values())))
    send = endpoint_type.send
    async def send_and_hold(endpoint, payload):
        global left
        await send(endpoint, payload)
        left -= 1
        if not left:
            compute("C code with the GIL")
    endpoint_type.send = send_and_hold
    say("connected")
"""
