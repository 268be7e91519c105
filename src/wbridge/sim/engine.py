"""Engine: the lockstep of one engine's workers: the real `Leader` and `Follower` machines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from wbridge.errors import InternalError
from wbridge.flow.actions import (
    Apply,
    FollowerAction,
    LeaderAction,
    Leave,
    RunBeforeApply,
    StartHoldTimer,
    ToCoordinator,
    ToCoordinatorMessage,
    ToLeader,
    ToWorkers,
)
from wbridge.flow.follower import Follower
from wbridge.flow.leader import Leader
from wbridge.flow.messages import (
    Announced,
    Commit,
    Done,
    Hold,
    Landed,
    Meet,
    OfferRefused,
    Promise,
    Ready,
    Release,
    Serve,
    Vacant,
    WorkerApplied,
)
from wbridge.sim.reader import Reader
from wbridge.sim.world import World

Serving = Callable[[int, int, Sequence[str]], None]
"""Called with a worker, the ticket that it takes, and the engines that take it together."""


class Engine:
    """Workers that wait in their polls for an update from the beginning, and apply it as one."""

    def __init__(
        self,
        world: World,
        name: str,
        members: Sequence[int],
        readers: Mapping[int, Reader],
        serve: Serving,
    ) -> None:
        self._world, self.name, self._members = world, name, members
        self._serve = serve
        self._readers = [readers[k] for k in members]
        self._followers = [Follower() for _ in members]
        config = world.config
        self._leader = Leader(
            len(members), lands_when_parked=config.lands_when_parked, max_poll_skew=config.max_poll_skew
        )
        self._to_coordinator: Callable[[str, ToCoordinatorMessage], None] | None = None
        self._parked_s = [0.0] * len(members)
        self.stalls_s: dict[int, float] = {}
        """By worker, once it has left its poll with the update."""
        self.done_s = 0.0

    def has_left(self) -> bool:
        """All workers have left their polls with the update."""
        return len(self.stalls_s) == len(self._members)

    def start(self, to_coordinator: Callable[[str, ToCoordinatorMessage], None]) -> None:
        self._to_coordinator = to_coordinator
        for rank, follower in enumerate(self._followers):
            follower.counter += 1
            self._follow(rank, follower.poll(wait=True))

    def from_ring(self, index: int, message: Landed | Vacant) -> None:
        self._to_leader(self._members.index(index), message)

    def from_coordinator(self, message: Announced | Serve | OfferRefused) -> None:
        match message:
            case Announced():
                self._lead(self._leader.announced(message))
            case Serve():
                self._lead(self._leader.serve(message))
            case OfferRefused():
                self._lead(self._leader.refused(message))

    def _to_leader(self, rank: int, message: Promise | Ready | WorkerApplied | Landed | Vacant) -> None:
        call = partial(self._at_leader, rank, message)
        self._world.tell(self._members[rank], self._members[0], call)

    def _at_leader(self, rank: int, message: Promise | Ready | WorkerApplied | Landed | Vacant) -> None:
        match message:
            case Promise():
                self._lead(self._leader.promise(rank, message))
            case Ready():
                self._lead(self._leader.ready(rank, message))
            case WorkerApplied():
                self._lead(self._leader.applied(rank, message))
            case Landed():
                self._lead(self._leader.landed(rank, message))
            case Vacant():
                self._lead(self._leader.vacant(rank, message))

    def _lead(self, actions: Iterable[LeaderAction]) -> None:
        assert self._to_coordinator is not None, "started"
        for action in actions:
            match action:
                case ToCoordinator(message):
                    self._to_coordinator(self.name, message)
                case ToWorkers(message):
                    for rank, member in enumerate(self._members):
                        self._world.tell(self._members[0], member, partial(self._at_worker, rank, message))
                case _:
                    raise InternalError(f"{action}: nothing is lost in a simulation; please report it")

    def _at_worker(self, rank: int, message: object) -> None:
        match message:
            case Serve(ticket, _, engines):
                self._serve(self._members[rank], ticket, engines)
            case Hold() | Meet() | Commit() | Done() | Release():
                self._follow(rank, self._followers[rank].message(message))
            case _:
                raise InternalError(f"{message}: nothing is aborted in a simulation; please report it")

    def _follow(self, rank: int, actions: Iterable[FollowerAction]) -> None:
        follower, now_s = self._followers[rank], self._world.timeline.now
        for action in actions:
            match action:
                case ToLeader(message):
                    self._to_leader(rank, message)  # type: ignore[arg-type]  # refusals do not occur
                case StartHoldTimer():
                    self._parked_s[rank] = now_s
                case RunBeforeApply(hold):
                    self._follow(rank, follower.before_apply_done(hold))
                case Apply(hold):
                    self._readers[rank].apply(partial(self._applied, rank, hold))
                case Leave():
                    self.stalls_s[self._members[rank]] = now_s - self._parked_s[rank]
                    self.done_s = max(self.done_s, now_s)
                case _:
                    raise InternalError(f"{action}: no poll ends without an update here; please report it")

    def _applied(self, rank: int, hold: int) -> None:
        self._follow(rank, self._followers[rank].applied(hold, "applied"))
