from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.unit.plan.test_explain import explained, sharded
from wbridge.cli.advise import Report
from wbridge.cli.main import main
from wbridge.cli.measure import measure_copies

JOB = ["--model-gb", "0.064", "--trainers", "2", "--engines", "2", "--engine-workers", "2"]
STEPS = ["--train-step-s", "1", "--rollout-step-s", "0.02"]
COPIES = ["--snapshot-gb-s", "5", "--apply-gb-s", "5", "--device-gb-s", "50", "--host-gb-s", "5"]
SLOW, FAST = ["--link-gb-s", "0.05"], ["--link-gb-s", "400"]


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> Report:
    assert main(["advise", *arguments, "--json"]) == 0
    return msgspec.json.decode(capsys.readouterr().out, type=Report)


def test_a_row_for_each_mode_and_a_choice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", *JOB, *STEPS, *COPIES, *SLOW, "--ring-sizes", "0,1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("snapshot_gb_s 5, ")
    assert lines[2].split()[:3] == ["mode", "slots", "AGST"]
    assert [line.split()[0] for line in lines[3:11:2]] == [
        "sync",
        "receiver_overlap",
        "sender_overlap",
        "async",
    ]
    assert lines[-1].startswith("async, 1 slots: workers compute ")


def test_json_has_inputs_predictions_and_choice(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, *JOB, *STEPS, *COPIES, *FAST)
    assert (found.load.link_nbytes, found.speeds.link_gb_s, found.steps.train_s) == (128 * 10**6, 400, 1)
    assert len(found.advice.predictions) == 4
    assert found.advice.best.name == "sync"


def test_limits_and_settings_count(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--set", "snapshot_versions=1", "--set", "slot_nbytes=1048576"]
    found = report(capsys, *JOB, *STEPS, *COPIES, *SLOW, *settings, "--max-host-gb", "0.031")
    assert found.load.slot_nbytes == 2**20
    assert found.advice.best.name == "sync"
    assert {p.trainer_host_nbytes for p in found.advice.predictions} == {0, 32 * 10**6}


def test_a_plan_and_a_file_of_speeds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    maps = sharded()
    plan, speeds = tmp_path / "plan.json", tmp_path / "speeds.json"
    told = explained(maps, {worker: f"{worker.role}{worker.rank // 2}" for worker in maps}, relays="off")
    plan.write_bytes(msgspec.json.encode(told))
    speeds.write_text('{"snapshot_gb_s": 1, "link_gb_s": 2, "apply_gb_s": 9}')
    found = report(capsys, "--plan", str(plan), "--speeds", str(speeds), *STEPS, *COPIES)
    assert (found.load.num_rollouts, found.load.egress_nbytes, found.load.link_nbytes) == (4, 1024, 2048)
    assert (found.speeds.snapshot_gb_s, found.speeds.link_gb_s) == (5, 2)


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (JOB + COPIES + SLOW, "--train-step-s and --rollout-step-s are needed"),
        (STEPS + COPIES + SLOW, "--model-gb or --plan"),
        (JOB + STEPS + COPIES, "give --link-gb-s"),
        ([*JOB, *STEPS, *COPIES, *SLOW, "--ring-sizes", "many"], "write numbers"),
        ([*JOB, *STEPS, *COPIES, *SLOW, "--plan", "/absent"], "wbridge.plan.explain"),
        ([*JOB, *STEPS, *COPIES, *SLOW, "--max-staleness", "0"], "raise a limit"),
        (["--link", "xyz", *JOB, *STEPS], "--serve-link"),
    ],
)
def test_what_is_missing_is_named_with_its_remedy(
    arguments: list[str], remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["advise", *arguments]) == 1
    assert remedy in capsys.readouterr().err


def test_a_speed_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    speeds = tmp_path / "speeds.json"
    speeds.write_text('{"warp": 9}')
    assert main(["advise", "--speeds", str(speeds), *JOB, *STEPS, *COPIES, *SLOW]) == 1
    assert "no such speed: warp" in capsys.readouterr().err


def test_copies_are_measured_with_the_products_own(capsys: pytest.CaptureFixture[str]) -> None:
    found = measure_copies("cpu", nbytes=2**18, num_workers=2)
    assert all(speed > 0 for speed in msgspec.structs.astuple(found))
    asked = report(capsys, *JOB, *STEPS, *SLOW, "--measure", "--measure-mb", "1", "--host-gb-s", "7")
    assert asked.speeds.host_gb_s == 7 and asked.speeds.apply_gb_s > 0
