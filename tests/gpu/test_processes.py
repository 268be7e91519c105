"""Trainer and engine in processes of their own on one GPU, and one that is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import wbridge.sync
from benchmarks.harness.model import rollout_target, trainer_source
from tests.gpu.accelerator import Accelerator
from tests.gpu.model import Parameters, is_exactly, load, values
from tests.process.scripts import heard, tell
from tests.unit.session.job import MODES, PATIENCE_S, rendezvous, together
from wbridge.device.select import why_no_network
from wbridge.native.ucx import why_missing

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(90)]
ROOT = Path(__file__).parents[2]
NUM_LAYERS = 3
"""100 MB."""


@contextmanager
def process(
    role: str, url: str, mode: str, num_engines: int, *more: object, transport: str = "auto"
) -> Iterator[subprocess.Popen[str]]:
    arguments = [role, url, mode, str(num_engines), *map(str, more), transport]
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.gpu.roles", *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        try:
            yield child
        finally:
            child.kill()


def follow(
    trainer: subprocess.Popen[str], receiver: wbridge.sync.ReceiverAdapter, parameters: Parameters
) -> None:
    """Take four versions, and look at each."""
    for version in (1, 2, 3, 4):
        tell(trainer, str(version))
        update = receiver.poll_requests(wait_s=PATIENCE_S)
        assert update is not None
        assert update.version == version
        assert is_exactly(parameters, version)
        assert heard(trainer) == f"sent {version} applied"


def shares(parameters: dict[str, object]) -> None:
    try:
        wbridge.share_memory(parameters.values())
    except wbridge.ConfigError as exc:
        pytest.skip(f"parameters on this device cannot be shared: {exc}")


@pytest.mark.parametrize(
    ("mode", "receiver_memory"),
    [*[(mode, "slots") for mode in MODES], ("sync", "shared"), ("sender_overlap", "shared")],
)
def test_whole_versions_cross_between_processes(
    mode: str, receiver_memory: str, accelerator: Accelerator, tmp_path: Path
) -> None:
    url = rendezvous(tmp_path)
    target, parameters = rollout_target("engine-0", 0, 1, NUM_LAYERS, device=accelerator.name)
    if receiver_memory == "shared":
        shares(parameters)
    config = values(mode, relay_patience_s=0.05)
    with (
        process("trainer", url, mode, 1, accelerator.name, NUM_LAYERS, "slots") as trainer,
        wbridge.sync.ReceiverAdapter(target, rendezvous=url, config=config) as receiver,
    ):
        receiver.connect()
        assert heard(trainer) == "connected"
        follow(trainer, receiver, parameters)


@pytest.mark.parametrize("transports", ["tcp,cuda_copy", "cuda_copy,cuda_ipc,sm,tcp"])
@pytest.mark.parametrize("mode", ["sync", "sender_overlap"])
def test_ucx_writes_slots_on_the_gpu(
    mode: str, transports: str, accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the trainer's slots there, or from its snapshot on the host: copied by UCX, or opened by it."""
    if (why := why_missing() or (why_no_network() if accelerator.is_gpu else None)) is not None:
        pytest.skip(why)
    monkeypatch.setenv("UCX_TLS", transports if accelerator.is_gpu else "tcp,self")
    url = rendezvous(tmp_path)
    target, parameters = rollout_target("engine-0", 0, 1, NUM_LAYERS, device=accelerator.name)
    config = values(mode, relay_patience_s=0.05, transport="ucxx")
    more = (accelerator.name, NUM_LAYERS, "slots")
    with (
        process("trainer", url, mode, 1, *more, transport="ucxx") as trainer,
        wbridge.sync.ReceiverAdapter(target, rendezvous=url, config=config) as receiver,
    ):
        receiver.connect()
        assert heard(trainer) == "connected"
        staging = receiver._rollout._engine._context.staging  # no public property
        assert [buffer.is_host for buffer in staging.buffers] == [not accelerator.is_gpu]
        follow(trainer, receiver, parameters)


@pytest.mark.parametrize(
    ("mode", "receiver_memory"), [("async", "slots"), ("sync", "slots"), ("sync", "shared")]
)
def test_a_trainer_goes_on_when_an_engine_is_killed(
    mode: str, receiver_memory: str, accelerator: Accelerator, tmp_path: Path
) -> None:
    """In the middle of an update: landed there and not applied (async), or waited for (sync)."""
    url, device = rendezvous(tmp_path), accelerator.name
    source, weights = trainer_source(0, 1, NUM_LAYERS, device=device)
    target, parameters = rollout_target("survivor", 0, 1, NUM_LAYERS, device=device)
    if receiver_memory == "shared":
        shares(parameters)
    config = values(mode, 2, relay_patience_s=0.05)
    with (
        process("engine", url, mode, 2, device, NUM_LAYERS, receiver_memory) as victim,
        wbridge.sync.SenderAdapter(source, rendezvous=url, config=config) as sender,
        wbridge.sync.ReceiverAdapter(target, rendezvous=url, config=config) as receiver,
    ):
        together(sender.connect, receiver.connect)
        assert heard(victim) == "connected"
        load(weights, 1)
        if mode == "async":
            assert sender.send_weights(1).landed() == {"survivor": "landed", "victim": "landed"}
            victim.send_signal(signal.SIGKILL)
            receiver.poll_requests(wait_s=PATIENCE_S)
        else:
            sending = threading.Thread(target=sender.send_weights, args=(1,))
            sending.start()
            assert heard(victim) == "applied 1 True"  # and the send still waits for the other engine
            victim.send_signal(signal.SIGKILL)
            receiver.poll_requests(wait_s=PATIENCE_S)
            sending.join()
        assert victim.wait(PATIENCE_S) == -signal.SIGKILL
        assert is_exactly(parameters, 1)
        for version in (2, 3):
            load(weights, version)
            delivery, update = together(
                lambda v=version: sender.send_weights(v), lambda: receiver.poll_requests(wait_s=PATIENCE_S)
            )
            assert update.version == version
            assert delivery.applied() == {"survivor": "applied", "victim": "lost"}
            assert is_exactly(parameters, version)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_an_engine_keeps_its_version_when_the_trainer_is_killed(
    mode: str, accelerator: Accelerator, tmp_path: Path
) -> None:
    url = rendezvous(tmp_path)
    target, parameters = rollout_target("engine-0", 0, 1, NUM_LAYERS, device=accelerator.name)
    config = values(mode, relay_patience_s=0.05)
    with (
        process("trainer", url, mode, 1, accelerator.name, NUM_LAYERS, "slots") as trainer,
        wbridge.sync.ReceiverAdapter(target, rendezvous=url, config=config) as receiver,
    ):
        receiver.connect()
        assert heard(trainer) == "connected"
        tell(trainer, "1")
        assert receiver.poll_requests(wait_s=PATIENCE_S) is not None
        assert heard(trainer) == "sent 1 applied"
        trainer.kill()
        trainer.wait(PATIENCE_S)
        for _ in range(100):
            assert receiver.poll_requests() is None
        with receiver.step() as version:
            assert version == 1
            assert is_exactly(parameters, 1)
