"""`wbridge simulate`, through the command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.unit.cli.test_plan import CONFIG, ROLLOUTS, TRAINERS
from wbridge.cli.main import main
from wbridge.cli.simulate import Simulated

LINKS = ["--nics-per-host", "1", "--nic-gb-s", "0.01"]
FREE = ["--latency-us", "0", "--local-latency-us", "0", "--message-us", "0"]


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(CONFIG))
    return str(tmp_path / "config.json")


def ran(capsys: pytest.CaptureFixture[str], *arguments: str) -> Simulated:
    assert main(["simulate", *arguments, "--json"]) == 0
    return msgspec.json.decode(capsys.readouterr().out, type=Simulated)


def test_links_and_speeds_are_those_that_are_given(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    job = [model, *TRAINERS, *ROLLOUTS]
    slow = ran(capsys, *job, *LINKS, *FREE)
    fast = ran(capsys, *job, "--nics-per-host", "1", "--nic-gb-s", "0.02", *FREE)
    assert slow.ours.time_s == pytest.approx(2 * fast.ours.time_s, rel=1e-4)
    payload = ran(capsys, *job, *LINKS, *FREE, "--efficiency", "0.5")
    assert payload.ours.time_s == pytest.approx(2 * slow.ours.time_s, rel=1e-4)
    late = ran(capsys, *job, *LINKS, *FREE, "--latency-us", "1000")
    assert late.speeds.latency_s == pytest.approx(1e-3)
    assert late.ours.time_s > slow.ours.time_s + 4e-3
    assert ran(capsys, *job, *LINKS, "--fold", "none", *FREE).ours.num_simulated == 12


def test_people_read_time_bound_stalls_links_and_baselines(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = ran(capsys, model, *TRAINERS, *ROLLOUTS, *LINKS, "--baselines")
    assert [other.name for other in found.baselines] == ["broadcast", "independent fetch"]
    assert main(["simulate", model, *TRAINERS, *ROLLOUTS, *LINKS, "--baselines"]) == 0
    text = capsys.readouterr().out
    assert f"{found.ours.time_over_bound:.3f} of the lower bound" in text
    assert f"{found.baselines[0].agst_s / found.ours.agst_s:.1f} times ours" in text
    assert "trainer-host000/nic0" in text and "chain of all rollouts" in text


def test_a_saved_plan_takes_as_long_as_its_description(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = str(tmp_path / "a.plan")
    assert main(["plan", "show", model, *TRAINERS, *ROLLOUTS, *LINKS, "--save", saved]) == 0
    capsys.readouterr()
    assert ran(capsys, saved, *LINKS).ours == ran(capsys, model, *TRAINERS, *ROLLOUTS, *LINKS).ours


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--latency-us", "-1"], "latency_s"),
        (["--efficiency", "2"], "efficiency"),
        (["--nics-per-host", "0"], "--nics-per-host and --nic-gb-s"),
    ],
)
def test_what_is_wrong_is_named(
    arguments: list[str], part: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", model, *TRAINERS, *ROLLOUTS, *arguments]) == 1
    assert part in capsys.readouterr().err


@pytest.mark.process
def test_as_a_process_of_its_own(model: str) -> None:
    command = [sys.executable, "-m", "wbridge.cli.main", "simulate", model, *TRAINERS, *ROLLOUTS]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, env=os.environ)
    assert shown.returncode == 0, shown.stderr
    assert "a version takes" in shown.stdout
