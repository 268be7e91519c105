"""The modes benchmark writes rows of the agreed form, and its counters count."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness.syscalls import count_system_calls

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.process, pytest.mark.timeout(60)]


def rows_of(path: Path, *arguments: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks", "modes", *arguments]
    subprocess.run([*command, "--json", str(path)], check=True, cwd=ROOT, timeout=60)
    rows = json.loads(path.read_text())
    assert all(set(row) == {"benchmark", "case", "system", "metric", "value", "unit"} for row in rows)
    assert {row["benchmark"] for row in rows} == {"modes"}
    return {row["metric"]: row["value"] for row in rows}


def test_rows_of_a_small_async_job(tmp_path: Path) -> None:
    small = ("--shard-mb", "17", "--updates", "3", "--rounds", "0")
    values = rows_of(tmp_path / "rows.json", "--case", "async", *small)
    stalls = {"trainer_stall_ratio", "rollout_stall_ratio", "agst_ms", "ewtt_ms", "staleness_versions"}
    assert stalls <= set(values)
    assert values["ewtt_ms"] >= values["agst_ms"] > 0
    assert values["trainer_stall_ms"] > 0 < values["rollout_stall_ms"]


def test_idle_polls_send_nothing_and_ask_the_system_for_nothing(tmp_path: Path) -> None:
    values = rows_of(tmp_path / "rows.json", "--case", "tp2")
    assert set(values) == {"idle_poll_us_p50", "idle_poll_frames", "idle_poll_system_calls"}
    assert values["idle_poll_frames"] == values["idle_poll_system_calls"] == 0
    assert 0 < values["idle_poll_us_p50"] < 50


def test_system_calls_of_a_thread_are_counted() -> None:
    assert count_system_calls(lambda: [os.getppid() for _ in range(7)]) == 7
    assert count_system_calls(lambda: sum(range(1000))) == 0
