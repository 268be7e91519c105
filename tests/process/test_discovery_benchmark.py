"""The discovery benchmark writes rows of the agreed form."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.process
def test_rows_of_the_toy_case(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "discovery", "--case", "toy-moe-10m"]
    subprocess.run([*command, "--json", str(tmp_path / "rows.json")], check=True, cwd=ROOT, timeout=60)
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert all(set(row) == {"benchmark", "case", "system", "metric", "value", "unit"} for row in rows)
    values = {row["metric"]: row["value"] for row in rows if row["system"] == "wbridge"}
    assert set(values) == {"trace_s", "peak_growth_mb", "regions", "tensors"}
    assert values["regions"] == values["tensors"] == 57
    assert values["peak_growth_mb"] < 300
