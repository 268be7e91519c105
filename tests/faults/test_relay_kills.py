"""Processes that pass weights on to each other, and one of them that is killed, or stops, in the middle."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.cast import TRAINERS, Cast, cast
from tests.faults.test_kills import wait_stopped
from tests.models.installed import needs
from wbridge.testing.transitions import OF_RELAYS, TRANSITIONS, Transition

pytestmark = [pytest.mark.process, pytest.mark.timeout(90), needs("ucxx")]

RELAYS = ("neighbour", "neighbour-2", "neighbour-3")
COPY_NBYTES, PAIR_NBYTES = 11_140, 13_576
"""Of the toy model on one worker, and on two ranks."""
BOUND_S = 15.0
"""Within this the others have the version; far above what it takes, and below the deadline of an update."""


def apart(name: str) -> str:
    """Each relay on a host of its own, the rest together with the trainers."""
    return name if name in RELAYS else "trainers"


def paired(name: str) -> str:
    """Two relays on one host, which pass on through its memory, and one alone."""
    return {"neighbour-2": "neighbour"}.get(name, apart(name))


def sent(job: Cast, *names: str) -> int:
    """The bytes that these have put somewhere so far."""
    for name in names:
        job[name].tell("counters")
    return sum(job[name].hear("counters")["put_nbytes"] for name in names)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("hosts", [apart, paired])
def test_relays_in_processes_bring_whole_versions(
    mode: str, hosts: Callable[[str], str], tmp_path: Path
) -> None:
    """Each takes one copy; trainers send one to all three, and the two ranks on their own host one."""
    with cast(tmp_path, mode, neighbours=3, hosts=hosts, relay_patience_s=20.0) as job:
        before = sent(job, *TRAINERS), sent(job, *RELAYS)
        for _ in range(3):
            job.update()
        by_trainers, by_relays = sent(job, *TRAINERS) - before[0], sent(job, *RELAYS) - before[1]
        assert by_relays == 3 * 2 * COPY_NBYTES
        assert by_trainers == 3 * (COPY_NBYTES + PAIR_NBYTES)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("hosts", [apart, paired])
def test_c57_a_relay_that_is_killed_costs_nobody_else_the_version(
    mode: str, hosts: Callable[[str], str], tmp_path: Path
) -> None:
    with cast(tmp_path, mode, neighbours=3, hosts=hosts, relay_patience_s=0.5) as job:
        observer = job.watch("neighbour", "half landed", signal.SIGKILL)
        version = job.begin()
        observer.hear("passed")
        assert job["neighbour"].died_of(signal.SIGKILL)
        hear_others(job, version)
        job.answers(*TRAINERS)
        job["trainer-0"].tell("outcomes")
        outcomes = job["trainer-0"].hear("outcomes")["outcomes"]
        assert outcomes == {
            "engine-1": "lost",
            **dict.fromkeys(("engine-0", "engine-2", "engine-3"), "applied"),
        }
        job["neighbour"].start()
        job.connect("neighbour")
        job.update()
        job.update()


EVERYWHERE = [
    pytest.param(mode, transition, id=f"{mode}-relay-{transition}".replace(" ", "_"))
    for mode in ("sync", "async")
    for transition in (*TRANSITIONS, *OF_RELAYS)
]
"""What a relay passes as one that receives, and what it passes as one that writes."""


def hear_others(job: Cast, version: int) -> None:
    """All but one of the relays have this version, soon."""
    begun_s = time.monotonic()
    for name in ("leader", "follower", *RELAYS[1:]):
        assert job[name].hear("applied", version=version)["whole"], f"{name} mixes versions"
    assert time.monotonic() - begun_s < BOUND_S


@pytest.mark.faults
@pytest.mark.parametrize(("mode", "transition"), EVERYWHERE)
def test_a_relay_that_is_killed_anywhere_costs_nobody_else_the_version(
    mode: str, transition: Transition, tmp_path: Path
) -> None:
    with cast(tmp_path, mode, neighbours=3, hosts=apart, relay_patience_s=0.5) as job:
        observer = job.watch("neighbour", transition, signal.SIGKILL)
        version = job.begin()
        observer.hear("passed")
        assert job["neighbour"].died_of(signal.SIGKILL)
        hear_others(job, version)
        job.answers(*TRAINERS)
        job["neighbour"].start()
        job.connect("neighbour")
        job.update()
        job.update()


@pytest.mark.faults
@pytest.mark.parametrize(("mode", "transition"), EVERYWHERE)
def test_a_relay_that_stops_anywhere_costs_nobody_else_the_version(
    mode: str, transition: Transition, tmp_path: Path
) -> None:
    """It is not lost, and has the next version like everybody else."""
    with cast(tmp_path, mode, neighbours=3, hosts=apart, relay_patience_s=0.5, heartbeat_s=10.0) as job:
        observer = job.watch("neighbour", transition, signal.SIGSTOP)
        version = job.begin()
        observer.hear("passed")
        wait_stopped(job["neighbour"].pid)
        hear_others(job, version)
        os.kill(job["neighbour"].pid, signal.SIGCONT)
        job.answers(*TRAINERS)
        job.update()
        job.update()


@pytest.mark.parametrize("ucx", ["tcp", "python"])
def test_relays_on_every_way_of_ucx(ucx: str, tmp_path: Path) -> None:
    with cast(tmp_path, "sync", neighbours=3, hosts=apart, ucx=ucx, relay_patience_s=20.0) as job:
        before = sent(job, *RELAYS)
        job.update()
        job.update()
        assert sent(job, *RELAYS) - before == 2 * 2 * COPY_NBYTES


@pytest.mark.parametrize(
    ("mode", "ucx"), [("sync", "native"), ("async", "native"), ("sync", "tcp"), ("sync", "python")]
)
def test_a_relay_that_is_stopped_is_bypassed(mode: str, ucx: str, tmp_path: Path) -> None:
    """Long before its lease is over: the others have the version, and it too when it goes on."""
    with cast(tmp_path, mode, neighbours=3, hosts=apart, ucx=ucx, relay_patience_s=0.5) as job:
        observer = job.watch("neighbour-2", "half landed", signal.SIGSTOP)
        version = job.begin()
        observer.hear("passed")
        wait_stopped(job["neighbour-2"].pid)
        begun_s = time.monotonic()
        for name in ("leader", "follower", "neighbour", "neighbour-3"):
            assert job[name].hear("applied", version=version)["whole"], f"{name} mixes versions"
        assert time.monotonic() - begun_s < BOUND_S
        os.kill(job["neighbour-2"].pid, signal.SIGCONT)
        job.update()
        job.update()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_trainer_that_is_killed_leaves_no_relay_waiting(mode: str, tmp_path: Path) -> None:
    """Nobody gets the version, or those that had all of it; the next one moves as ever."""
    with cast(tmp_path, mode, neighbours=3, hosts=apart, relay_patience_s=0.5) as job:
        observer = job.watch("trainer-1", "half landed", signal.SIGKILL)
        job.begin()
        observer.hear("passed")
        assert job["trainer-1"].died_of(signal.SIGKILL)
        job.answers("trainer-0")
        job["trainer-1"].start()
        job.connect("trainer-1")
        before = sent(job, *RELAYS)
        job.update()
        job.update()
        assert sent(job, *RELAYS) > before
