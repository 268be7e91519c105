"""A job of real processes, what may become of it, and how it is made whole again."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
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

TRAINERS = ("trainer-0", "trainer-1")
NEIGHBOURS = ("neighbour", "neighbour-2")

SEGMENTS = Path("/dev/shm")

ENOUGH_SENDS = 8
"""While members change, a version may have to be sent a few times."""


class Cast:
    """Two trainer ranks, an engine of two workers and neighbours of one; perhaps a coordinator of its own."""

    def __init__(
        self,
        path: Path,
        mode: str,
        *,
        external: bool = False,
        neighbours: int = 1,
        hosts: Callable[[str], str] = lambda _: "",
        ucx: str = "native",
        **config: object,
    ) -> None:
        """`hosts` names the host of an actor; empty: the real one. `ucx`: see `choose_ucx`."""
        url = rendezvous(path)
        values = settings(mode, 1 + neighbours, transport="auto", **{**SHORT, **config})
        self.actors: dict[str, Actor] = {}
        self.engines: dict[str, str] = {}
        if external:
            job_wide = {name: values[name] for name in ("mode", "num_engines", "slot_nbytes")}
            job_wide |= {name: config[name] for name in ("heartbeat_s",) if name in config}
            self.actors["coordinator"] = Actor("coordinator", work_as_coordinator, url, job_wide)
            values = {**values, "coordinator": "external"}
        for rank in range(2):
            self.actors[f"trainer-{rank}"] = Actor(
                f"trainer-{rank}",
                work_as_trainer,
                url,
                {**values, "host": hosts(f"trainer-{rank}")},
                rank,
                ucx,
            )
        for name, engine, rank, size in (
            ("leader", "engine-0", 0, 2),
            ("follower", "engine-0", 1, 2),
            *[
                (f"neighbour-{i}"[: None if i > 1 else -2], f"engine-{i}", 0, 1)
                for i in range(1, 1 + neighbours)
            ],
        ):
            self.engines[name] = engine
            own = {**values, "host": hosts(name)}
            self.actors[name] = Actor(name, work_as_rollout, url, own, engine, rank, size, ucx)
        self.external = external
        self.version = 0
        self.is_closed = False
        self.connect(*self.workers)

    @property
    def workers(self) -> list[str]:
        return [name for name in self.actors if name != "coordinator"]

    @property
    def rollouts(self) -> list[str]:
        return [name for name in self.workers if not name.startswith("trainer")]

    def __getitem__(self, name: str) -> Actor:
        return self.actors[name]

    def connect(self, *names: str) -> None:
        for name in names:
            self[name].tell("connect")
        for name in names:
            self[name].hear("connected")

    def watch(self, victim: str, transition: Transition, number: int) -> Actor:
        """Arm the process that passes the transition: the victim itself, if it does."""
        seats: Sequence[tuple[str, Seat]] = [(victim, SEATS.get(victim, "relay"))]
        if victim in ("trainer-0", "coordinator"):
            home = "coordinator" if self.external else "trainer-0"
            seats = [*seats, (home, "coordinator")] if victim == "trainer-0" and not self.external else seats
        seats = [*seats, ("leader", "leader"), ("trainer-1", "trainer")]
        name, seat = next((name, seat) for name, seat in seats if transition in SEEN[seat])
        observer = self[name]
        observer.tell("arm", transition=transition, seat=seat, pid=self[victim].pid, signal=number)
        observer.hear("armed")
        return observer

    def begin(self, *, attempts: int = 1) -> int:
        """Ask the ranks for the next version; each repeats a send that fails, whatever the other does."""
        self.version += 1
        for name in TRAINERS:
            self[name].tell("send", version=self.version, attempts=attempts)
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
        rollouts = rollouts or tuple(self.rollouts)
        for _ in range(ENOUGH_SENDS):
            version = self.begin(attempts=ENOUGH_SENDS)
            answers = self.answers(*TRAINERS)
            if all(answer["what"] == "sent" for answer in answers) and self.is_applied(rollouts):
                break
        else:
            raise AssertionError(f"{ENOUGH_SENDS} sends have failed, the last with {answers}")
        for name in rollouts:
            assert self[name].hear("applied", version=version)["whole"], f"{name} mixes versions"
        return version

    def is_applied(self, rollouts: Sequence[str]) -> bool:
        """Whether the last version has been applied there, as the trainer hears it."""
        self["trainer-0"].tell("outcomes")
        answer = self["trainer-0"].hear("outcomes", "failed")
        if answer["what"] == "failed":
            assert answer["is_ours"] and answer["text"], answer
            return False
        outcomes = answer["outcomes"]
        return all(outcomes.get(self.engines[name]) == "applied" for name in rollouts)

    def hear_failure(self, name: str) -> Message:
        """A worker's polls have ended with an error of ours; what it holds is whole, or known as tainted."""
        failure, state = self[name].hear("failed"), self[name].hear("state")
        assert failure["is_ours"] and failure["text"], failure
        assert state["tainted"] or state["whole"], f"{name} mixes versions: {state}"
        return failure

    def has_failed(self, name: str) -> bool:
        self[name].drain()
        return any(message["what"] == "failed" for message in self[name].heard)

    def close(self, *order: str) -> None:
        """All leave at once, or in this order; nothing of ours is left in any of them."""
        left: dict[str, Message] = {}
        for name in order:
            self[name].tell("close")
            left[name] = self[name].hear("closed")["left"]
        if not order:
            for name in self.workers:
                self[name].tell("close")
            left = {name: self[name].hear("closed")["left"] for name in self.workers}
        if self.external:
            self["coordinator"].tell("close")
            self["coordinator"].hear("closed")
        for name, leaks in left.items():
            assert not any(leaks.values()), f"{name} leaves {leaks}"
        for actor in self.actors.values():
            assert actor.ended() == 0, actor
        self.is_closed = True


def orphans() -> set[str]:
    """Segments of UCX that no process has mapped; our own have no name, and end with their last mapping."""
    names = {name for name in os.listdir(SEGMENTS) if name.startswith("ucx_")}
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended
            mapped = path.read_text()
            names = {name for name in names if name not in mapped}
    return names


@contextmanager
def cast(
    path: Path,
    mode: str,
    *,
    external: bool = False,
    neighbours: int = 1,
    hosts: Callable[[str], str] = lambda _: "",
    ucx: str = "native",
    **config: object,
) -> Iterator[Cast]:
    """A connected job that has applied version 1 everywhere; whatever happens, its processes end."""
    segments = set(os.listdir(SEGMENTS))
    job = Cast(path, mode, external=external, neighbours=neighbours, hosts=hosts, ucx=ucx, **config)
    try:
        job.update()
        yield job
        if not job.is_closed:
            job.close()
        assert not orphans() - segments, "shared segments are left"
    finally:
        for actor in job.actors.values():
            actor.kill()


__all__ = ["PATIENCE_S", "SEATS", "TRAINERS", "Cast", "cast"]
