"""Public failure cases of memberships, with real processes: who dies, leaves, comes back or is slow."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.faults.cast import TRAINERS, Cast, cast
from wbridge.testing.transitions import Transition

pytestmark = [pytest.mark.process, pytest.mark.timeout(60)]

SOON_S = 15.0


def restart_trainers(job: Cast) -> None:
    for name in TRAINERS:
        os.kill(job[name].pid, signal.SIGKILL)
        assert job[name].died_of(signal.SIGKILL)
    for name in TRAINERS:
        job[name].start()
    job.connect(*TRAINERS)


@pytest.mark.parametrize("moment", ["before", "half landed", "after"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_c57_a_killed_engine_is_named_and_the_others_finish(mode: str, moment: str, tmp_path: Path) -> None:
    with cast(tmp_path, mode, neighbours=2) as job:
        victim, others = job["neighbour"], ["leader", "follower", "neighbour-2"]
        if moment == "half landed":
            transition: Transition = "half landed"
            observer = job.watch("neighbour", transition, signal.SIGKILL)
            version = job.begin()
            observer.hear("passed")
        elif moment == "before":
            os.kill(victim.pid, signal.SIGKILL)
            version = job.begin()
        else:
            version = job.update()
            os.kill(victim.pid, signal.SIGKILL)
        assert victim.died_of(signal.SIGKILL)
        if moment != "after":
            assert [answer["what"] for answer in job.answers(*TRAINERS)] == ["sent", "sent"]
            for name in others:
                assert job[name].hear("applied", version=version, within_s=SOON_S)["whole"]
        job["trainer-0"].tell("outcomes")
        outcomes = job["trainer-0"].hear("outcomes")["outcomes"]
        expected = "applied" if moment == "after" else "lost"
        assert outcomes == {"engine-0": "applied", "engine-1": expected, "engine-2": "applied"}
        job.update(*others)
        victim.start()
        job.connect("neighbour")
        job.update()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_c58_barriers_come_from_the_live_engines(mode: str, tmp_path: Path) -> None:
    with cast(tmp_path, mode) as job:
        for name in ("leader", "follower"):
            os.kill(job[name].pid, signal.SIGKILL)
            assert job[name].died_of(signal.SIGKILL)
        for _ in range(3):
            begun_s = time.monotonic()
            job.update("neighbour")
            assert time.monotonic() - begun_s < SOON_S
        for name in ("leader", "follower"):
            job[name].start()
        job.connect("leader", "follower")
        job.update()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_c61_a_trainer_restarts_twice_and_the_engines_stay(mode: str, tmp_path: Path) -> None:
    with cast(tmp_path, mode) as job:
        pids = {name: job[name].pid for name in job.rollouts}
        for _ in range(2):
            restart_trainers(job)
            job.update()
        assert pids == {name: job[name].pid for name in job.rollouts}


@pytest.mark.parametrize("first", ["rollouts", "trainers"])
def test_c52_versions_are_skipped_go_down_and_anybody_leaves_first(first: str, tmp_path: Path) -> None:
    with cast(tmp_path, "async", snapshot_versions=1) as job:
        job.version = 5
        job.begin()
        job.answers(*TRAINERS)
        job.update()  # whether or not an engine took the one before
        restart_trainers(job)
        job.version = 2
        assert job.update() == 3
        trainers, rollouts = list(TRAINERS), job.rollouts
        job.close(*(rollouts + trainers if first == "rollouts" else trainers + rollouts))


def test_c56_an_engine_that_joins_during_an_update_serves_nothing_before_its_first(tmp_path: Path) -> None:
    with cast(tmp_path, "sync") as job:
        os.kill(job["neighbour"].pid, signal.SIGKILL)
        assert job["neighbour"].died_of(signal.SIGKILL)
        observer = job.watch("leader", "half landed", signal.SIGSTOP)
        version = job.begin()
        observer.hear("passed")
        job["neighbour"].start()
        job["neighbour"].tell("connect")
        os.kill(job["leader"].pid, signal.SIGCONT)
        job.answers(*TRAINERS)
        for name in ("leader", "follower"):
            assert job[name].hear("applied", version=version)["whole"]
        job["neighbour"].hear("connected")
        job["neighbour"].tell("state")
        state = job["neighbour"].hear("state")
        assert (state["tainted"], state["version"]) == (False, None)
        assert job.update() > version


def test_c67_a_slow_engine_delays_nobody_and_a_wait_for_it_can_end(tmp_path: Path) -> None:
    with cast(tmp_path, "async", heartbeat_s=10.0) as job:  # slow, not lost
        observer = job.watch("leader", "half landed", signal.SIGSTOP)
        version = job.begin()
        observer.hear("passed")
        job.answers(*TRAINERS)
        job["trainer-0"].tell("outcomes", timeout_s=0.2)
        failure = job["trainer-0"].hear("failed")
        assert failure["error"] == "BarrierTimeout" and "engine-0" in failure["text"]
        for _ in range(5):
            assert job["neighbour"].hear("applied", version=version, within_s=SOON_S)["whole"]
            version = job.begin()
            assert [answer["what"] for answer in job.answers(*TRAINERS)] == ["sent", "sent"]
        os.kill(job["leader"].pid, signal.SIGCONT)
        job.update()


def test_c67_a_send_that_waits_for_a_slow_engine_can_be_interrupted(tmp_path: Path) -> None:
    with cast(tmp_path, "sync", heartbeat_s=10.0) as job:  # slow, not lost
        observer = job.watch("leader", "half landed", signal.SIGSTOP)
        job.begin()
        observer.hear("passed")
        os.kill(job["trainer-0"].pid, signal.SIGINT)
        time.sleep(2.0)  # or the version lands before the trainer has noticed
        os.kill(job["leader"].pid, signal.SIGCONT)
        job["trainer-0"].hear("interrupted")
        answer = job["trainer-1"].hear("failed", "sent")
        assert answer["what"] == "sent" or answer["error"] == "UpdateAborted", answer
        job.update()
