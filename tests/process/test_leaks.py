"""What a long job holds: as much after 200 updates as after 50, and after 20 connections as after a few."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.faults.cast import Cast, cast
from tests.faults.roles import Message, measure
from tests.unit.session.job import running_sync

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

GROWTH_NBYTES = 2**20
"""Less than one version of the toy model, 11 KiB, kept by each of the 150 updates that are measured."""


def measured(job: Cast) -> dict[str, Message]:
    for name in job.workers:
        job[name].tell("measure")
    return {name: job[name].hear("measured") for name in job.workers}


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_c69_two_hundred_updates_leave_nothing_behind(mode: str, tmp_path: Path) -> None:
    with cast(tmp_path, mode) as job:
        while job.version < 50:
            job.update()
        before = measured(job)
        while job.version < 200:
            job.update()
        after = measured(job)
    for name in before:
        grown = after[name].pop("resident") - before[name].pop("resident")
        assert grown < GROWTH_NBYTES, f"{name} has grown by {grown} bytes in 150 updates"
        assert after[name] == before[name], name


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_c69_twenty_connections_leave_nothing_behind(mode: str, tmp_path: Path) -> None:
    seen: list[Message] = []
    for index in range(20):
        path = tmp_path / str(index)
        path.mkdir()
        with running_sync(path, mode, engines={"engine-0": 2}, transport="shared_memory") as job:
            job.update(1)
            assert job.holds(1)
        del job
        assert not [t.name for t in threading.enumerate() if t.name.startswith("wbridge")]
        seen.append(measure(()))
    grown = seen[-1].pop("resident") - seen[4].pop("resident")
    assert grown < 4 * GROWTH_NBYTES, f"grown by {grown} bytes in 15 connections"
    assert seen[-1] == seen[4]
