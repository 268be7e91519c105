"""The `simulate` benchmark, for its smallest deployment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]


def test_rows_of_the_smallest_deployment(tmp_path: Path) -> None:
    told = tmp_path / "rows.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "simulate",
        "--only",
        "Moonlight-16B-2",
        "--json",
        str(told),
    ]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=55, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = {row["metric"]: row for row in json.loads(told.read_text())}
    assert {row["case"] for row in rows.values()} == {"Moonlight-16B-2"}
    assert {row["benchmark"] for row in rows.values()} == {"simulate"}
    assert 1 <= rows["time_over_bound"]["value"] <= 1.15
    assert rows["time_over_bound"]["value"] <= rows["with_copies_over_bound"]["value"]
    assert rows["agst_ms"]["value"] == pytest.approx(rows["time_ms"]["value"], rel=0.01)  # all stall in sync
    assert (rows["agst_ratio_to_broadcast"]["paper"], rows["agst_ratio_to_p2p"]["paper"]) == (25.1, 42.0)
    assert rows["agst_ratio_to_broadcast"]["value"] > 5
