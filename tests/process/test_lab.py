"""The network lab: it measures what is sent between hosts of a limited rate, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lab.fleet import TRAINER_HOST, Fleet, layers_for
from benchmarks.lab.measure import Result, System, Update
from benchmarks.lab.predict import predict
from benchmarks.lab.rows import FETCH, GLOO, OURS, Row, rows_of, verdicts
from benchmarks.lab.usage import Usage
from benchmarks.links.hosts import HEADER_NBYTES, Counters, why_not
from tests.faults.roles import FORKS
from wbridge.cli.measure import LinkSpeed

ROOT = Path(__file__).resolve().parents[2]
REASON = why_not()
in_the_lab = pytest.mark.skipif(bool(REASON), reason=REASON or "the lab can run here")
TINY = ["--hosts", "2", "--trainers", "1", "--tensor-parallel", "1", "--hidden", "128", "--slot-mb", "0.25"]
TINY += ["--no-simulation"]
NOBODY = 65534
MBIT = 100.0
BUSY_S = 120.0
"""A machine with other work may take so long for what else takes seconds: processes that start."""
pytestmark = pytest.mark.timeout(3 * BUSY_S)


@contextlib.contextmanager
def run_lab(*arguments: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "benchmarks", "lab", *TINY, *arguments]
    with subprocess.Popen(command, cwd=ROOT, text=True, **options) as lab:
        try:
            yield lab
        finally:
            lab.kill()


@in_the_lab
@pytest.mark.process
def test_what_hosts_send_and_receive_is_counted_by_the_kernel(tmp_path: Path) -> None:
    pytest.importorskip("ucxx")
    rows = tmp_path / "rows.json"
    with run_lab("--only", OURS, "--layers", "4", "--updates", "1", "--json", str(rows)) as lab:
        assert lab.wait(BUSY_S) == 0
    found = [row for row in json.loads(rows.read_text()) if row["case"] == "hosts-2"]
    values = {row["metric"]: row["value"] for row in found}
    assert {row["system"] for row in found} == {OURS}
    assert 1.0 <= values["egress_copies"] < 2.05
    assert 1.0 <= values["ingress_over_need_max"] < 1.05
    sent = values["egress_copies"] + values["rollout_egress_copies"]
    assert sent == pytest.approx(2.0, rel=0.05)  # each of two hosts has got a copy from somewhere
    assert values["time_over_bound"] > 0.8  # no faster than the links, but for the bucket's first burst
    assert values["time_over_bound"] == pytest.approx(values["wall_s"] / values["bound_s"], rel=0.01)


def children_of(pid: int) -> Iterator[int]:
    """The processes of the lab that have entered a host."""
    own = os.stat("/proc/self/ns/net").st_ino
    for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        try:
            if os.stat(f"/proc/{child}/ns/net").st_ino != own:
                yield child
        except FileNotFoundError:
            continue


def wait_for(condition: Any, what: str) -> None:
    deadline_s = time.monotonic() + BUSY_S
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.05)


@in_the_lab
@pytest.mark.process
@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_lab_leaves_no_process(stop: signal.Signals) -> None:
    """Then no namespace stays either: nothing else holds one."""
    with run_lab("--only", FETCH, "--mbit", "1", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as lab:
        wait_for(lambda: len(list(children_of(lab.pid))) == 3, "the workers enter their hosts")
        workers = list(children_of(lab.pid))
        lab.send_signal(stop)
        assert lab.wait(BUSY_S) == (-stop if stop == signal.SIGKILL else 128 + stop)
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), "the workers end")


def tell_without_root(told: Any) -> None:
    os.setuid(NOBODY)
    told.put(why_not())


@pytest.mark.process
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can stop to be root")
def test_the_lab_needs_root() -> None:
    told = FORKS.Queue()
    process = FORKS.Process(target=tell_without_root, args=(told,))
    process.start()
    assert "root" in told.get(timeout=BUSY_S)
    process.join()


@pytest.mark.process
def test_the_lab_names_the_package_that_is_missing(tmp_path: Path) -> None:
    with run_lab(env={**os.environ, "PATH": str(tmp_path)}, stderr=subprocess.PIPE) as lab:
        assert "ip and tc not found: install iproute2" in lab.communicate(timeout=BUSY_S)[1]
    assert lab.returncode == 1


def test_a_fleet_knows_what_its_hosts_need() -> None:
    fleet = Fleet(3, num_layers=2, hidden=128, num_trainers=2, engines_per_host=2, tensor_parallel=2)
    assert fleet.host_of_worker[:2] == [TRAINER_HOST] * 2
    assert fleet.host_of_worker[2:] == [f"rollouts-{k}" for k in (0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2)]
    model_nbytes = sum(
        2 * t.shape[0] * (t.shape[1] if len(t.shape) == 2 else 1) for t in fleet.workload.tensors
    )
    assert set(fleet.needs.values()) == {model_nbytes} == {fleet.copy_nbytes}
    assert fleet.bound_s(100) == pytest.approx(model_nbytes * 8 / 100e6)


def test_the_payload_keeps_a_link_busy_for_long_enough() -> None:
    num_layers = layers_for(8.0, 100.0, 1024)
    assert Fleet(2, num_layers).bound_s(100) >= 8 > Fleet(2, num_layers - 1).bound_s(100)


def result_of(name: str, wall_s: float, *, copies: float = 1.0, lab_usage: float = 0.1) -> Result:
    fleet = Fleet(2, num_layers=1, hidden=128)
    nbytes, num_packets = fleet.copy_nbytes, 100
    headers = HEADER_NBYTES * num_packets
    sent = Counters(0, 0, int(copies * nbytes) + headers, num_packets)
    received = Counters(nbytes + headers, num_packets, 0, 0)
    counted = {TRAINER_HOST: sent} | dict.fromkeys(fleet.rollout_hosts, received)
    return Result(System(name, ""), fleet, (Update(wall_s, counted, Usage(lab_usage, 0.9)),))


def test_the_simulator_takes_the_fleet_and_a_link() -> None:
    fleet = Fleet(2, num_layers=1, hidden=128, num_trainers=1, tensor_parallel=1)
    options = {"slot_nbytes": str(2**18)}
    times_s = [predict(fleet, options, LinkSpeed(gb_s, 1e-6)) for gb_s in (0.0125, 0.00125)]
    assert times_s[1] == pytest.approx(10 * times_s[0], rel=0.02)
    assert 0.99 < times_s[0] / fleet.bound_s(MBIT) < 2.1


def values_of(rows: list[Row], system: str) -> dict[str, object]:
    return {str(row["metric"]): row["value"] for row in rows if row["system"] == system}


def test_headers_are_no_payload_and_ratios_are_ours_over_theirs() -> None:
    bound_s = Fleet(2, num_layers=1, hidden=128).bound_s(MBIT)
    results = [result_of(OURS, 1.1 * bound_s), result_of(GLOO, 2.2 * bound_s, copies=2.0)]
    rows = rows_of([*results, result_of(FETCH, 4.4 * bound_s, copies=2.0)], MBIT)
    ours = values_of(rows, OURS)
    assert (ours["egress_copies"], ours["ingress_over_need_max"]) == (1.0, 1.0)
    assert (ours["time_over_bound"], ours["ratio_to_gloo"], ours["ratio_to_fetch"]) == (1.1, 0.5, 0.25)
    assert values_of(rows, GLOO)["egress_copies"] == 2.0
    assert len(verdicts(rows)) == 3
    assert all(line.endswith(": met") for line in verdicts(rows))


def test_a_broken_promise_is_told() -> None:
    result = dataclasses.replace(result_of(OURS, 1000.0, copies=2.0), predicted_s=800.0)
    said = [line.rpartition(" ")[2] for line in verdicts(rows_of([result], MBIT))]
    assert said == ["MISSED", "met", "MISSED", "MISSED"]


def test_rows_of_a_lab_without_cores_to_spare_are_not_valid() -> None:
    rows = rows_of([result_of(OURS, 1.0, lab_usage=0.6)], MBIT)
    assert not any(row["valid"] for row in rows)
    assert "60 % of the cores" in str(rows[0]["reason"])
    assert all(line.endswith("INVALID") for line in verdicts(rows))


def test_what_cannot_be_measured_is_a_row_with_its_reason() -> None:
    (row,) = rows_of([Result(System(GLOO, "gloo"), Fleet(2, 1), why_not="no such module")], MBIT)
    assert (row["metric"], row["value"], row["reason"]) == ("unavailable", None, "no such module")
