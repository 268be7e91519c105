"""Processes that are killed, or stopped, at each transition of an update, in each role."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from tests.faults.cast import PATIENCE_S, SEATS, Cast, cast
from wbridge.testing.transitions import TRANSITIONS, Transition

pytestmark = [pytest.mark.process, pytest.mark.timeout(90)]

ENGINE = ("leader", "follower")
HEARTBEAT_S = 0.5
LEASE_S = 3 * HEARTBEAT_S
BOUND_S = 15.0
"""Within this an engine that is not concerned takes the next version; far above what it takes."""

PRODUCT = [
    (mode, victim, transition) for mode in ("sync", "async") for victim in SEATS for transition in TRANSITIONS
]
# What every change is tested with; `nox -s faults` runs them all.
KILLED = {
    ("sync", "trainer-1", "first write"),
    ("sync", "follower", "committed"),
    ("async", "trainer-0", "granted"),
    ("async", "leader", "half landed"),
}
PAUSED = {("sync", "leader", "held"), ("async", "trainer-1", "half landed")}
STOPPED = {("sync", "trainer-1", "half landed"), ("async", "follower", "applying")}


def cases(sample: set[tuple[str, str, str]]) -> list[ParameterSet]:
    """The product; what is not in the sample is marked."""
    return [
        pytest.param(
            *case, id="-".join(case).replace(" ", "_"), marks=() if case in sample else pytest.mark.faults
        )
        for case in PRODUCT
    ]


def settle(job: Cast, victim: str) -> None:
    """Those that worked with the victim know it, and the others go on without it."""
    trainers = [name for name in ("trainer-0", "trainer-1") if name != victim]
    job.answers(*trainers)
    if victim in ENGINE:
        other = ENGINE[1 - ENGINE.index(victim)]
        failure = job.hear_failure(other)
        assert "lost" in failure["text"] or "gone" in failure["text"], failure
        version = job.begin()
        begun_s = time.monotonic()
        answers = job.answers(*trainers)
        if any(answer["what"] == "failed" for answer in answers):
            version = job.update("neighbour")
        else:
            assert job["neighbour"].hear("applied", version=version)["whole"]
        assert time.monotonic() - begun_s < BOUND_S


@pytest.mark.parametrize(("mode", "victim", "transition"), cases(KILLED))
def test_a_killed_process_is_lost_and_its_successor_joins(
    mode: str, victim: str, transition: Transition, tmp_path: Path
) -> None:
    with cast(tmp_path, mode, external=victim == "coordinator") as job:
        observer = job.watch(victim, transition, signal.SIGKILL)
        job.begin()
        observer.hear("passed")
        assert job[victim].died_of(signal.SIGKILL)
        settle(job, victim)
        job[victim].start()
        back = [] if victim == "coordinator" else [victim]
        if victim in ENGINE:
            back = [*ENGINE]
        job.connect(*back)
        job.update()
        job.update()


@pytest.mark.parametrize(("mode", "victim", "transition"), cases(PAUSED))
def test_a_process_that_stops_for_less_than_its_lease_is_waited_for(
    mode: str, victim: str, transition: Transition, tmp_path: Path
) -> None:
    with cast(tmp_path, mode, external=victim == "coordinator") as job:
        observer = job.watch(victim, transition, signal.SIGSTOP)
        version = job.begin()
        observer.hear("passed")
        wait_stopped(job[victim].pid)
        os.kill(job[victim].pid, signal.SIGCONT)
        assert [answer["what"] for answer in job.answers("trainer-0", "trainer-1")] == ["sent"] * 2
        for name in job.rollouts:
            assert job[name].hear("applied", version=version)["whole"]
        job.update()


@pytest.mark.parametrize(("mode", "victim", "transition"), cases(STOPPED))
def test_a_process_that_stops_for_longer_than_its_lease_is_dropped_and_hears_of_it(
    mode: str, victim: str, transition: Transition, tmp_path: Path
) -> None:
    with cast(tmp_path, mode, external=victim == "coordinator", heartbeat_s=HEARTBEAT_S) as job:
        observer = job.watch(victim, transition, signal.SIGSTOP)
        job.begin()
        observer.hear("passed")
        wait_stopped(job[victim].pid)
        begun_s = time.monotonic()
        settle(job, victim)
        time.sleep(max(0.0, begun_s + 2 * LEASE_S - time.monotonic()))  # what the case is about
        os.kill(job[victim].pid, signal.SIGCONT)
        if victim in ENGINE:
            job.hear_failure(victim)
            job.connect(*ENGINE)
        elif victim != "coordinator":
            job.answers(victim)
        job.update()
        job.update()


def wait_stopped(pid: int) -> None:
    """The signal is on its way: nobody tells when it has arrived."""
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        with open(f"/proc/{pid}/stat") as file:
            if file.read().rsplit(")", 1)[1].split()[0] == "T":
                return
        time.sleep(0.005)
    raise AssertionError(f"process {pid} does not stop")
