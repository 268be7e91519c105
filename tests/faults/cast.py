"""A job of real processes, what may become of it, and how it is made whole again."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.faults.roles import (
    PATIENCE_S,
    SHORT,
    Actor,
    Message,
    work_as_coordinator,
    work_as_rollout,
    work_as_trainer,
)
from tests.unit.session.job import rendezvous, settings
from wbridge.testing.transitions import SEEN, Seat, Transition

SEATS: dict[str, Seat] = {
    "trainer-0": "trainer",
    "trainer-1": "trainer",
    "leader": "leader",
    "follower": "follower",
    "coordinator": "coordinator",
}
"""The roles; `leader` and `follower` make up `engine-0`, beside `engine-1` of one worker, the `neighbour`."""

ENOUGH_SENDS = 8
"""While members change, a version may have to be sent a few times."""


class Cast:
    """Two trainer ranks, an engine of two workers and one of one; perhaps a coordinator of its own."""

    def __init__(self, path: Path, mode: str, *, external: bool = False, **config: object) -> None:
        url = rendezvous(path)
        values = settings(mode, 2, transport="auto", **{**SHORT, **config})
        self.actors: dict[str, Actor] = {}
        if external:
            job_wide = {name: values[name] for name in ("mode", "num_engines", "slot_nbytes")}
            job_wide |= {name: config[name] for name in ("heartbeat_s",) if name in config}
            self.actors["coordinator"] = Actor("coordinator", work_as_coordinator, url, job_wide)
            values = {**values, "coordinator": "external"}
        for rank in range(2):
            self.actors[f"trainer-{rank}"] = Actor(f"trainer-{rank}", work_as_trainer, url, values, rank)
        for name, engine, rank, size in (
            ("leader", "engine-0", 0, 2),
            ("follower", "engine-0", 1, 2),
            ("neighbour", "engine-1", 0, 1),
        ):
            self.actors[name] = Actor(name, work_as_rollout, url, values, engine, rank, size)
        self.external = external
        self.version = 0
        self.connect(*self.workers)

    @property
    def workers(self) -> list[str]:
        return [name for name in self.actors if name != "coordinator"]

    @property
    def rollouts(self) -> list[str]:
        return ["leader", "follower", "neighbour"]

    def __getitem__(self, name: str) -> Actor:
        return self.actors[name]

    def connect(self, *names: str) -> None:
        for name in names:
            self[name].tell("connect")
        for name in names:
            self[name].hear("connected")

    def watch(self, victim: str, transition: Transition, number: int) -> Actor:
        """Arm the process that passes the transition: the victim itself, if it does."""
        seats: Sequence[tuple[str, Seat]] = [(victim, SEATS[victim])]
        if victim in ("trainer-0", "coordinator"):
            home = "coordinator" if self.external else "trainer-0"
            seats = [*seats, (home, "coordinator")] if victim == "trainer-0" and not self.external else seats
        seats = [*seats, ("leader", "leader"), ("trainer-1", "trainer")]
        name, seat = next((name, seat) for name, seat in seats if transition in SEEN[seat])
        observer = self[name]
        observer.tell("arm", transition=transition, seat=seat, pid=self[victim].pid, signal=number)
        observer.hear("armed")
        return observer

    def begin(self, trainers: Sequence[str] = ("trainer-0", "trainer-1")) -> int:
        """Ask these ranks for the next version."""
        self.version += 1
        for name in trainers:
            self[name].tell("send", version=self.version)
        return self.version

    def answers(self, *names: str) -> list[Message]:
        """What became of these ranks' sends: they returned, or raised an error of ours with a remedy."""
        messages = [self[name].hear("sent", "failed") for name in names]
        for message in messages:
            if message["what"] == "failed":
                assert message["is_ours"] and message["text"], message
        return messages

    def update(self, *rollouts: str) -> int:
        """Send until these have applied a version, whole; return it.

        A send that fails because members change is repeated, as its error says; a rank whose adapter
        has ended is connected again.
        """
        for _ in range(ENOUGH_SENDS):
            version = self.begin()
            failures = {
                name: answer
                for name in ("trainer-0", "trainer-1")
                if (answer := self.answers(name)[0])["what"] == "failed"
            }
            ended = [name for name, answer in failures.items() if answer["error"] == "EndpointClosed"]
            self.connect(*ended)
            if not failures:
                break
        else:
            raise AssertionError(f"{ENOUGH_SENDS} sends have failed, the last with {failures}")
        for name in rollouts or self.rollouts:
            assert self[name].hear("applied", version=version)["whole"], f"{name} mixes versions"
        return version

    def hear_failure(self, name: str) -> Message:
        """A worker's polls have ended with an error of ours; what it holds is whole, or known as tainted."""
        failure, state = self[name].hear("failed"), self[name].hear("state")
        assert failure["is_ours"] and failure["text"], failure
        assert state["tainted"] or state["whole"], f"{name} mixes versions: {state}"
        return failure

    def has_failed(self, name: str) -> bool:
        self[name].drain()
        return any(message["what"] == "failed" for message in self[name].heard)

    def close(self) -> None:
        """All leave at once; nothing of ours is left in any of them."""
        for name, actor in self.actors.items():
            if name != "coordinator":
                actor.tell("close")
        left = {name: self[name].hear("closed")["left"] for name in self.workers}
        if self.external:
            self["coordinator"].tell("close")
            self["coordinator"].hear("closed")
        for name, leaks in left.items():
            assert not any(leaks.values()), f"{name} leaves {leaks}"
        for actor in self.actors.values():
            assert actor.ended() == 0, actor


@contextmanager
def cast(path: Path, mode: str, *, external: bool = False, **config: object) -> Iterator[Cast]:
    """A connected job that has applied version 1 everywhere; whatever happens, its processes end."""
    segments = set(os.listdir("/dev/shm"))
    job = Cast(path, mode, external=external, **config)
    try:
        job.update()
        yield job
        job.close()
        assert not {name for name in set(os.listdir("/dev/shm")) - segments if "wbridge" in name}
    finally:
        for actor in job.actors.values():
            actor.kill()


__all__ = ["PATIENCE_S", "SEATS", "Cast", "cast"]
