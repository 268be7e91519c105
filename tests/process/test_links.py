"""Hosts of their own: they share no network, their links have the rate that was asked for, and none stays."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.links.hosts import Host, open_hosts, why_not
from benchmarks.links.jobs import measure_links
from tests.faults.roles import FORKS
from wbridge.transport.host import host_identity

ROOT = Path(__file__).resolve().parents[2]
REASON = why_not()
pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(60),
    pytest.mark.skipif(bool(REASON), reason=REASON or "links can be limited here"),
]
HOLD = """
import signal, sys
from benchmarks.links.hosts import open_hosts
with open_hosts(["a", "b"], mbit=100) as hosts:
    print(hosts["a"].path, flush=True)
    signal.pause()
"""


def tell_identity(host: Host, told: Any) -> None:
    host.enter()
    told.put((host_identity(), [name for _, name in socket.if_nameindex()]))


def test_processes_on_two_hosts_are_told_apart() -> None:
    told = FORKS.Queue()
    with open_hosts(["a", "b"], mbit=100) as hosts:
        for host in hosts.values():
            process = FORKS.Process(target=tell_identity, args=(host, told))
            process.start()
            process.join()
        found = [told.get(timeout=10) for _ in hosts]
    assert len({identity for identity, _ in found} | {host_identity()}) == 3
    assert all(set(names) >= {"lo", "eth0"} for _, names in found)
    assert "switch" not in [name for _, name in socket.if_nameindex()]


def test_a_link_has_its_rate_on_the_products_own_transport() -> None:
    pytest.importorskip("ucxx")
    with open_hosts(["a", "b"], mbit=200) as hosts:
        (link,) = measure_links([(hosts["a"], hosts["b"])])
    assert 0.6 * 200 / 8e3 < link.link_gb_s < 1.05 * 200 / 8e3
    assert 0 < link.round_s < 0.1


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_stays_behind_a_killed_process(stop: signal.Signals) -> None:
    """A namespace is one as long as something holds it: the descriptors end with their process."""
    command = [sys.executable, "-c", HOLD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as holder:
        assert holder.stdout is not None
        path = holder.stdout.readline().strip()
        inode = os.stat(path).st_ino
        holder.send_signal(stop)
        assert holder.wait(10) == -stop
    held = subprocess.run(
        ["lsns", "-t", "net", "-n", "-o", "NS"], capture_output=True, text=True, check=False
    )
    assert str(inode) not in held.stdout.split()
    assert not Path(path).exists()


@pytest.mark.slow
@pytest.mark.timeout(190)
def test_rows_of_the_benchmark_of_the_advice(tmp_path: Path) -> None:
    pytest.importorskip("ucxx")
    rows = tmp_path / "rows.json"
    command = [sys.executable, "-m", "benchmarks", "advise", "--mode", "async", "--link", "400mbit"]
    subprocess.run(
        [*command, "--layers", "1", "--updates", "2", "--json", str(rows)], check=True, cwd=ROOT, timeout=180
    )
    found = json.loads(rows.read_text())
    assert {(row["benchmark"], row["case"]) for row in found} == {("advise", "async-400mbit")}
    values = {row["metric"]: row["value"] for row in found}
    assert values["agst_ms"] > 0 < values["predicted_agst_ms"]
    ratio = values["predicted_agst_ms"] / values["agst_ms"]
    assert values["predicted_over_measured"] == pytest.approx(ratio, rel=0.01)


@pytest.mark.slow
@pytest.mark.timeout(190)
def test_rows_of_the_benchmark_of_versions_that_come_one_upon_the_other(tmp_path: Path) -> None:
    pytest.importorskip("ucxx")
    rows = tmp_path / "rows.json"
    command = [sys.executable, "-m", "benchmarks", "stream", "--mode", "async", "--sends", "8"]
    subprocess.run([*command, "--json", str(rows)], check=True, cwd=ROOT, timeout=180)
    found = json.loads(rows.read_text())
    assert {(row["benchmark"], row["case"]) for row in found} == {("stream", "async")}
    values = {(row["system"], row["metric"]): row["value"] for row in found}
    copies = {system: values[system, "copies_per_version"] for system in ("wbridge", "wbridge-direct")}
    assert copies["wbridge-direct"] == pytest.approx(2)
    assert 1 <= copies["wbridge"] < 2
    assert values["wbridge", "trainer_stall_ms"] > 0
