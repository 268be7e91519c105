"""Without the CUDA extras: one process works, and more than one says what to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import wbridge.sync
from tests.docs.test_code_blocks import program
from tests.models.toy import Trainer
from tests.process.scripts import heard, process
from tests.unit.session.job import rendezvous

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
WITHOUT = """
import sys
assert not {"ucxx", "libucx"} & set(sys.modules), "too late to leave them out"
sys.modules.update(dict.fromkeys(["ucxx", "libucx", "cuda", "rmm"]))
"""
ENGINE = """
rollout = Rollout()
with wbridge.sync.ReceiverAdapter(rollout.target, rendezvous=url, config={"mode": mode}) as receiver:
    receiver.connect()
    say(receiver.poll_requests(wait_s=20.0).version, rollout.holds(1))
"""
OPEN_UCXX = """
import anyio
from wbridge import Config
from wbridge.transport.select import open_transports

async def main():
    async with open_transports(Config(transport="ucxx"), "token", name="worker"):
        pass

anyio.run(main)
"""
DOCTOR = "from wbridge.cli.main import main; sys.exit(main(['doctor']))"


def run_without(code: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT + code]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False)


def test_one_process_needs_no_extra(tmp_path: Path) -> None:
    run = run_without(program(ROOT / "README.md"), tmp_path)
    assert run.returncode == 0, run.stderr
    assert "version 3" in run.stdout


def test_one_host_needs_no_extra(tmp_path: Path) -> None:
    trainer, url = Trainer(), rendezvous(tmp_path)
    with (
        process(ENGINE, url, "async", first=WITHOUT) as engine,
        wbridge.sync.SenderAdapter(trainer.source, rendezvous=url, config={"mode": "async"}) as sender,
    ):
        sender.connect()
        trainer.set_version(1)
        assert sender.send_weights(1).applied() == {"engine-0": "applied"}
        assert heard(engine) == "1 True"


def test_asking_for_ucxx_names_the_extra(tmp_path: Path) -> None:
    run = run_without(OPEN_UCXX, tmp_path)
    assert run.returncode == 1
    assert "NativeUnavailable" in run.stderr
    assert "[cu12]" in run.stderr


def test_doctor_names_the_extra(tmp_path: Path) -> None:
    run = run_without(DOCTOR, tmp_path)
    assert run.returncode == 1, run.stderr
    assert "[cu12]" in run.stdout
