"""The benchmark against peers: it runs, and its arithmetic holds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.systems.catalogue import CASES, OURS, RAW_SOCKET, entries
from benchmarks.systems.chart import chart_of
from benchmarks.systems.results import Result, rows_of, verdicts
from benchmarks.systems.workloads import workload_of

ROOT = Path(__file__).parents[2]


@pytest.mark.process
def test_tiny_updates_are_measured_and_drawn(tmp_path: Path) -> None:
    found = tmp_path / "rows.json"
    command = [sys.executable, "-m", "benchmarks", "peers", "--case", "tiny", "--only", OURS]
    command += ["--updates", "2", "--rounds", "1", "--json", str(found)]
    subprocess.run(command, check=True, cwd=ROOT, timeout=55)
    metrics = {row["metric"]: row["value"] for row in json.loads(found.read_text())}
    assert metrics["num_updates"] == 2
    assert metrics["latency_over_notify"] > 0
    assert OURS in found.with_suffix(".svg").read_text()


@pytest.mark.parametrize("case", ["w1", "w2rep", "w2tp", "w3", "tiny"])
def test_every_element_of_a_rollout_is_moved_once(case: str) -> None:
    workload = workload_of(case)
    wanted = sum(2 * _numel(shape) for shape in workload.rollout_shapes.values()) * workload.job.num_rollouts
    assert workload.nbytes == wanted
    boxes = {(move.rollout, move.target, move.target_box) for move in workload.moves}
    assert len(boxes) == len(workload.moves)


def test_ratios_take_the_memcpy_of_their_own_update() -> None:
    ours, raw = (_result("w1-tcp", name, wall_s) for name, wall_s in ((OURS, 0.3), (RAW_SOCKET, 0.2)))
    rows = rows_of([ours, raw])
    found = {(row["system"], row["metric"]): row["value"] for row in rows}
    assert found[OURS, "ratio_to_memcpy"] == pytest.approx(3.0)
    assert found[OURS, "ratio_to_raw_socket"] == pytest.approx(1.5)
    assert any("MISSED" in line for line in verdicts(rows))
    assert chart_of(rows).count("<rect") == 3


def test_what_cannot_run_is_a_row_with_its_reason() -> None:
    (row,) = rows_of([Result("w1", "ray", why_not="no such package")])
    assert (row["metric"], row["value"], row["reason"]) == ("unavailable", None, "no such package")


def test_every_case_has_this_package_first() -> None:
    assert all(entries(case)[0].name == OURS for case in CASES)


def _result(case: str, system: str, wall_s: float) -> Result:
    update = {"wall_s": wall_s, "push_s": wall_s, "cpu_s": wall_s, "memcpy_s_per_byte": 0.1 / 1000}
    cell = {"connect_s": 1.0, "launch_s": 1.0, "peak_rss_mb": 1.0, "load1": 0.0, "nbytes": 1000}
    return Result(case, system, [{**cell, "num_discarded": 0, "updates": [update]}])


def _numel(shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] if len(shape) == 2 else 1)
