"""The GPU's tests and benchmark run here on the host, so that their own mistakes are not found on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.process, pytest.mark.timeout(60)]


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        timeout=55,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def test_rows_of_a_dry_run(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    cases = [word for case in ("pinned", "wake", "digest", "async", "in place") for word in ("--only", case)]
    small = ("--shard-mb", "34", "--large-mb", "0", "--updates", "2", "--rounds", "20")
    run("-m", "benchmarks", "gpu", "--device", "cpu", "--json", str(path), *small, *cases)
    rows = json.loads(path.read_text())
    assert all(set(row) == {"benchmark", "case", "metric", "value", "unit"} for row in rows)
    found = {(row["case"], row["metric"]): row["value"] for row in rows}
    for figure in (
        ("machine", "torch"),
        ("pinned", "d2h_ratio"),
        ("wake", "wait_p99_us"),
        ("digest", "many_to_copy_ratio"),
        ("async", "trainer_stall_ratio"),
        ("async", "trainer_resident_mb"),
        ("in place", "update_to_device_copy_ratio"),
    ):
        assert figure in found


@pytest.mark.parametrize("role", ["trainer", "rollout"])
def test_steps_beside_a_version_are_told_from_others(role: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    small = ("--shard-mb", "34", "--large-mb", "0", "--updates", "2", "--only", f"overlap {role}")
    run("-m", "benchmarks", "gpu", "--device", "cpu", "--json", str(path), *small)
    found = {row["metric"]: row["value"] for row in json.loads(path.read_text())}
    assert found["slow_down_busy_steps_count"] > 0 < found["slow_down_idle_steps_count"]


def test_the_suite_runs_its_parts_and_writes_a_summary(tmp_path: Path) -> None:
    tests = "--on cpu tests/gpu/test_session.py -k 'widened and sync'"
    suite = str(ROOT / "benchmarks" / "harness" / "gpu_suite.py")
    said = run(suite, "--out", str(tmp_path), "--parts", "wheels,tests", "--tests", tests)
    assert "2 passed, 0 skipped, 0 failed" in said
    assert "== tests: passed" in said
    assert json.loads((tmp_path / "summary.json").read_text())["tests"]["passed"] is True
    assert "2 passed" in (tmp_path / "tests.log").read_text()
