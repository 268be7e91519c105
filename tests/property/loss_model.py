"""A job for the explorer: the coordinator is lost at any point, for good or until a new incarnation comes.

One trainer, one engine of two workers. The new coordinator numbers its tickets from 1 again. Of a grant
that is on its way when the coordinator dies, either end may get nothing; the trainer may die with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.property.lockstep_model import FOLLOW, LockstepWorld
from wbridge.flow.actions import Separated, StartGrantTimer
from wbridge.flow.messages import Finished, OfferRefused, Serve, WithdrawOffer

LOST = "coordinator lost"
NEW = "new coordinator"


class LossWorld(LockstepWorld):
    def __init__(self, *, restart: bool, **options: Any) -> None:
        self.restart = restart
        self.coordinator = "first"  # first, dead, second
        self.to_leader: list[Any] = []
        self.trainer = "none"  # of the grant: none, coming, has
        self.trainer_incarnation = 1
        self.incarnation = 1  # the engine's
        self.timer = 0
        super().__init__(brisk=True, **options)

    def coordinator_steps(self) -> Iterator[tuple[Any, ...]]:
        if self.coordinator == "first":
            for trainer_gets in {True, self.trainer == "none"}:
                for lost in {0, len(self.to_leader)}:
                    yield (
                        f"~coordinator dies, trainer lives and gets the grant: {trainer_gets}, {lost} lost",
                        "crash",
                        trainer_gets,
                        lost,
                    )
        if self.coordinator == "dead" and self.restart:
            yield "~a new coordinator starts", "start_anew"
        if self.trainer == "coming":
            yield "trainer: takes the grant", "train"
        if self.coordinator == "second" and self.trainer_incarnation == 1:
            yield "trainer: follows to the new incarnation", "trainer_follows"
        if self.to_leader:
            yield f"leader: {self.to_leader[0]}", "tell_leader"
        if self.timer:
            yield "leader: coordinator_timeout_s of the grant", "time_out_grant"
        if self.coordinator == "dead" or not self.asked:
            return
        if self.coordinator == "second" and (self.trainer_incarnation, self.incarnation) != (2, 2):
            return
        if self.open:
            return
        if self.finished[-1:] != ["applied"]:
            yield "coordinator: grants", "grant"
        elif self.direct:
            yield "coordinator: refuses", "refuse_offer"

    def worker_steps(self, i: int, worker: Any) -> Iterator[tuple[Any, ...]]:
        moving = self.trainer == "has" and self.trainer_incarnation == self.incarnation
        for step in super().worker_steps(i, worker):
            if step[1] not in ("arrive", "fill") or moving:
                yield step
        grant = self.leader._grant
        pinned = not self.direct and len(self.small) < len(self.workers)
        if i == 0 and moving and pinned and grant is not None and not self.leader._landed:
            yield "the bytes land", "land_all"

    def grant(self) -> None:
        self.asked = False
        self.trainer = "coming"
        self.open = len(self.finished) + 1
        self.to_leader.append(Serve(self.open, 10 * self.trainer_incarnation + self.open, ("e",)))

    def refuse_offer(self) -> None:
        self.asked = False
        self.to_leader.append(OfferRefused(self.offer, "nothing open"))

    def land_all(self) -> None:
        self.land_whole_rings(self.leader._grant.ticket)  # type: ignore[union-attr]  # checked by the step

    def crash(self, trainer_gets: bool, lost: int) -> None:
        self.coordinator = "dead"
        if self.trainer != "none":
            self.trainer = "has" if trainer_gets else "none"
        del self.to_leader[len(self.to_leader) - lost :]
        self.to_leader.append(LOST)
        self.asked = False

    def start_anew(self) -> None:
        self.coordinator = "second"
        self.to_leader.append(NEW)
        self.asked, self.open, self.finished = False, 0, []

    def train(self) -> None:
        self.trainer = "has"

    def trainer_follows(self) -> None:
        self.trainer, self.trainer_incarnation = "none", 2

    def time_out_grant(self) -> None:
        ticket, self.timer = self.timer, 0
        self.lead(self.leader.grant_timed_out(ticket))

    def tell_leader(self) -> None:
        message = self.to_leader.pop(0)
        if message == LOST:
            self.lead(self.leader.coordinator_lost())
        elif message == NEW:
            self.timer = 0
            self.lead(self.leader.leave())
        elif isinstance(message, Serve):
            self.lead(self.leader.serve(message))
        else:
            self.lead(self.leader.refused(message))

    def outlive(self, action: Any) -> None:
        if isinstance(action, StartGrantTimer):
            self.timer = action.ticket
            return
        assert isinstance(action, Separated)
        self.incarnation = 2
        self.to_all(FOLLOW)
        self.begin()

    def coordinate(self, message: Any) -> None:
        """What the leader says to a coordinator that is gone is lost; a new one drops the old epoch's."""
        alive = {"first": 1, "dead": 0, "second": 2}[self.coordinator]
        if alive == self.incarnation:
            if isinstance(message, WithdrawOffer):
                raise AssertionError("nobody withdraws in this model")
            if isinstance(message, Finished):
                self.trainer = "none"
            super().coordinate(message)

    def all_vacant(self) -> None:
        for i in range(len(self.workers)):
            self.leader._vacant[i] = self.leader._num_ended
        self.leader._parked = self.direct
        self.lead(self.leader._go_on([]))

    def good_end(self) -> bool:
        free = all(w.phase in ("between", "stepping") and not w.follower.flag for w in self.workers)
        rest = free and not any(self.down) and not any(self.up) and not self.to_leader
        if not rest or len({w.version for w in self.workers}) > 1:
            return False
        if self.coordinator == "dead":
            return True
        return self.finished[-1:] == ["applied"] and (self.coordinator == "first" or self.incarnation == 2)
