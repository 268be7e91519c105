"""The commands that talk to a job, as processes of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

pytestmark = pytest.mark.process

RUN = "import sys; from wbridge.cli.main import main; sys.exit(main())"


def wbridge(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RUN, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_standalone_coordinator_answers_status_and_cleans_up(tmp_path: Path, stop: signal.Signals) -> None:
    file = tmp_path / "rendezvous"
    command = [sys.executable, "-c", RUN, "coordinator", f"file://{file}", "--set", "num_engines=2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as coordinator:
        assert coordinator.stdout is not None
        assert coordinator.stdout.readline().startswith("listening on 127.0.0.1:")

        shown = wbridge("status", f"file://{file}")
        assert shown.returncode == 0, shown.stderr
        assert "epoch none yet, forming" in shown.stdout
        assert "2 of 2 engines" in shown.stdout
        assert msgspec.json.decode(wbridge("status", f"file://{file}", "--json").stdout)["phase"] == "forming"

        coordinator.send_signal(stop)
        assert coordinator.wait(10) == 0
    assert not file.exists()


def test_status_without_a_coordinator_says_what_to_start(tmp_path: Path) -> None:
    shown = wbridge("status", f"file://{tmp_path}/absent", "--timeout-s", "0.2")
    assert shown.returncode == 1
    assert "start trainer rank 0 or `wbridge coordinator`" in shown.stderr
    assert "Traceback" not in shown.stderr


def test_doctor_finds_the_installed_ucx() -> None:
    pytest.importorskip("ucxx")
    shown = wbridge("doctor")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "ucxx" in shown.stdout
    assert "verbs" in shown.stdout


def test_advise_measures_the_link_to_another_process() -> None:
    command = [sys.executable, "-c", RUN, "advise", "--serve-link"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as far_end:
        assert far_end.stdout is not None
        address = far_end.stdout.readline().strip()
        job = ("--model-gb", "0.01", "--train-step-s", "1", "--rollout-step-s", "0.1")
        shown = wbridge("advise", *job, "--measure", "--measure-mb", "1", "--link", address, "--json")
        assert shown.returncode == 0, shown.stderr
        assert far_end.wait(10) == 0
    speeds = msgspec.json.decode(shown.stdout)["speeds"]
    assert speeds["link_gb_s"] > 0.01 and 0 < speeds["round_s"] < 1
