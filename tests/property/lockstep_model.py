"""A job for the explorer: the workers of one engine, stepping and polling, around `Leader` and `Follower`.

Channels between leader and workers are FIFO and arbitrarily slow. Steps depend on each other: `tp`, a
step ends when all have begun it; `pp`, a stage needs the stage before it, the first stage the last one's
step two earlier; `free`, workers may be two steps apart. Checked: one step index, one version.

Where bytes land: with pinned rings before the hold; `direct`, while all are parked, but `early` as if pinned;
on the `small` workers as much as their ring takes before the hold, and the rest while all are parked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from tests.property.stepping import Worker, can_finish
from wbridge.flow.actions import (
    Apply,
    EngineBroken,
    Leave,
    PollFails,
    RunBeforeApply,
    StartHoldTimer,
    ToCoordinator,
    ToLeader,
    ToWorkers,
    Unpark,
)
from wbridge.flow.follower import Follower
from wbridge.flow.leader import Leader
from wbridge.flow.messages import (
    Announced,
    Finished,
    Landed,
    Meet,
    Offer,
    OfferRefused,
    Promise,
    Ready,
    Refuse,
    Serve,
    TicketAborted,
    Vacant,
    WithdrawHold,
    WithdrawOffer,
    WorkerApplied,
)

CLOSED = "closed"
FOLLOW = "follow"
EVENTS = {
    Promise: "promise",
    Ready: "ready",
    Refuse: "refuse",
    WithdrawHold: "withdraw",
    WorkerApplied: "applied",
    Landed: "landed",
    Vacant: "vacant",
}


class LockstepWorld:
    def __init__(
        self,
        *,
        depends: str,
        num_workers: int = 2,
        num_tickets: int = 1,
        direct: bool = False,
        early: bool = False,
        small: tuple[int, ...] = (),
        failures: int = 0,
        timeouts: int = 0,
        refusals: int = 0,
        cancels: int = 0,
        deaths: int = 0,
        leader_dies: bool = False,
        aborts: int = 0,
        slow_apply: bool = False,
        brisk: bool = False,
        leader: type[Leader] = Leader,
        follower: type[Follower] = Follower,
    ) -> None:
        self.depends = depends
        self.direct = direct  # versions are taken only while all are parked
        self.early = early  # they count as landed only then
        self.brisk = brisk  # a step and its poll are one: the moments inside are not looked at
        self.slow_hooks = refusals > 0
        self.small = small
        self.slow_apply = slow_apply or direct or deaths > 0 or bool(small)
        self.leader_dies = leader_dies
        self.budget = {"timeout": timeouts, "refusal": refusals, "cancel": cancels, "death": deaths}
        self.budget |= {"abort": aborts, "failure": failures}
        self.workers = [Worker(follower) for _ in range(num_workers)]
        self.down: list[list[Any]] = [[] for _ in self.workers]
        self.up: list[list[Any]] = [[] for _ in self.workers]
        self.leader = leader(num_workers, lands_when_parked=direct or early, max_poll_skew=8)
        self.leader_lives = True
        self.num_tickets = num_tickets
        self.open = 0  # the ticket granted to the engine
        self.aborted = False  # no more bytes of it come
        self.finished: list[str] = []  # outcomes, ticket by ticket
        self.offer = 0
        self.asked = False  # an offer waits at the coordinator
        self.ran: dict[int, int] = {}  # step -> version that a worker ran it with
        self.fault = ""
        self.begin()

    def begin(self) -> None:
        self.all_vacant()
        if self.direct:
            self.lead(self.leader.announced(Announced(1, 1, 1)))

    # What can happen ----------------------------------------------------------------------------------

    def steps(self) -> Iterator[tuple[Any, ...]]:
        yield from self.coordinator_steps()
        if self.leader_lives:
            for i, channel in enumerate(self.up):
                if channel:
                    yield f"leader: {channel[0]} of {i}", "hear", i
        for i, worker in enumerate(self.workers):
            if not worker.outcome:
                yield from self.worker_steps(i, worker)

    def coordinator_steps(self) -> Iterator[tuple[Any, ...]]:
        if not self.leader_lives:
            return
        if self.asked and not self.open and len(self.finished) < self.num_tickets:
            yield f"ticket {len(self.finished) + 1} granted", "grant"
        if self.asked and self.direct and len(self.finished) == self.num_tickets:
            yield "coordinator: refuses", "refuse_offer"
        if self.open and self.budget["abort"]:
            yield f"~coordinator: aborts ticket {self.open}", "abort"

    def worker_steps(self, i: int, worker: Worker) -> Iterator[tuple[Any, ...]]:
        step = worker.follower.counter + 1
        if worker.phase == "between" and self.brisk:
            if can_finish(self.workers, self.depends, i):
                yield f"worker {i}: a step and a poll", "step_and_poll", i
        elif worker.phase == "between":
            yield f"worker {i}: begins step {step} (v{worker.version})", "enter", i
        elif worker.phase == "stepping" and can_finish(self.workers, self.depends, i):
            yield f"worker {i}: ends step {step}, counts poll {step}", "count", i
        elif worker.phase == "polled":
            yield f"worker {i}: reads flag {worker.follower.flag}", "read_flag", i
        elif worker.phase == "handed":
            yield f"worker {i}: loop runs poll {step - 1}", "run_poll", i
        elif worker.phase == "waiting":
            if self.budget["cancel"] and not worker.cancelled:
                yield f"~worker {i}: poll cancelled", "cancel", i
            if self.budget["timeout"] and worker.timer:
                yield f"~worker {i}: hold_timeout_s", "time_out", i
        if worker.hook:
            yield f"worker {i}: before_apply", "run_hook", i, True
            if self.budget["refusal"]:
                yield f"~worker {i}: before_apply refuses", "run_hook", i, False
        if worker.filling and worker.filling == self.open and not self.aborted:
            yield f"worker {i}: its ring is full", "fill", i
        if worker.apply and worker.bytes:
            yield f"worker {i}: applies ticket {worker.apply.ticket}", "end_apply", i, "applied"
        if worker.apply and worker.void:
            yield f"worker {i}: gives up, nothing written", "end_apply", i, "aborted"
            yield f"worker {i}: gives up, some written", "end_apply", i, "tainted"
        if worker.apply and self.budget["failure"]:
            yield f"~worker {i}: a copy fails", "fail_apply", i
        if worker.apply and not (worker.bytes or worker.void or self.aborted):
            yield f"worker {i}: bytes arrive", "arrive", i
        if self.down[i]:
            yield f"worker {i}: {self.down[i][0]}", "tell", i
        if self.budget["death"] and (i == 0) == self.leader_dies:
            if i:
                yield f"~worker {i}: dies", "die", i, ()
            else:
                others = [j for j in range(1, len(self.workers)) if self.down[j]]
                for chosen in range(2 ** len(others)):
                    lost = tuple(j for k, j in enumerate(others) if chosen >> k & 1)
                    yield f"~worker 0, the leader, dies; its last message to {lost} is lost", "die", 0, lost

    # Workers ------------------------------------------------------------------------------------------

    def enter(self, i: int) -> None:
        worker = self.workers[i]
        step = worker.follower.counter + 1
        ran = self.ran.setdefault(step, worker.version)
        if ran != worker.version:
            self.fault = (
                f"torn: step {step} runs with v{worker.version} on worker {i}, a peer ran it with v{ran}"
            )
        worker.phase = "stepping"
        self.normalise()

    def count(self, i: int) -> None:
        self.workers[i].follower.counter += 1
        self.workers[i].phase = "polled"
        self.normalise()

    def read_flag(self, i: int) -> None:
        self.workers[i].phase = "handed" if self.workers[i].follower.flag else "between"

    def run_poll(self, i: int) -> None:
        self.workers[i].phase = "waiting"
        self.follow(i, self.workers[i].follower.poll())

    def step_and_poll(self, i: int) -> None:
        self.enter(i)
        self.count(i)
        self.read_flag(i)
        if self.workers[i].phase == "handed":
            self.run_poll(i)

    def cancel(self, i: int) -> None:
        self.budget["cancel"] -= 1
        self.workers[i].cancelled = True
        self.follow(i, self.workers[i].follower.cancelled())

    def time_out(self, i: int) -> None:
        self.budget["timeout"] -= 1
        hold, self.workers[i].timer = self.workers[i].timer, 0
        self.follow(i, self.workers[i].follower.hold_timed_out(hold))

    def run_hook(self, i: int, agrees: bool) -> None:
        worker = self.workers[i]
        hold, worker.hook = worker.hook, 0
        if agrees:
            self.follow(i, worker.follower.before_apply_done(hold))
        else:
            self.budget["refusal"] -= 1
            self.follow(i, worker.follower.refused(hold, "busy"))

    def fill(self, i: int) -> None:
        ticket, self.workers[i].filling = self.workers[i].filling, 0
        self.up[i].append(Landed(ticket, whole=False))

    def arrive(self, i: int) -> None:
        worker = self.workers[i]
        worker.bytes = True
        assert worker.apply is not None
        self.up[i].append(Landed(worker.apply.ticket))

    def end_apply(self, i: int, outcome: Any) -> None:
        worker = self.workers[i]
        assert worker.apply is not None
        apply, worker.apply = worker.apply, None
        if outcome != "aborted":
            worker.version = apply.version if outcome == "applied" else -1
        self.follow(i, worker.follower.applied(apply.hold, outcome))

    def fail_apply(self, i: int) -> None:
        self.budget["failure"] -= 1
        self.workers[i].void = True
        self.end_apply(i, "tainted")

    def tell(self, i: int) -> None:
        worker, message = self.workers[i], self.down[i].pop(0)
        if message == CLOSED:
            self.follow(i, worker.follower.leader_lost("connection lost"))
        elif isinstance(message, TicketAborted):
            worker.void, worker.filling = True, 0
            if worker.apply and worker.apply.ticket == message.ticket and self.holds_all:
                self.fault = f"worker {i} loses ticket {message.ticket} after its commit"
        elif isinstance(message, Serve):
            worker.bytes = not self.direct and i not in self.small
            worker.void, worker.filling = False, message.ticket if i in self.small else 0
        elif message != FOLLOW:
            self.follow(i, worker.follower.message(message))

    def die(self, i: int, lost: tuple[int, ...]) -> None:
        self.budget["death"] -= 1
        worker = self.workers[i]
        worker.outcome, worker.phase = "dead", "gone"
        worker.hook, worker.apply, self.down[i] = 0, None, []
        if i:
            self.up[i].append(CLOSED)
            return
        self.leader_lives = False
        for j in range(1, len(self.workers)):
            if j in lost:
                self.down[j].pop()
            self.down[j].append(CLOSED)

    def follow(self, i: int, actions: list[Any]) -> None:
        worker = self.workers[i]
        for action in actions:
            if isinstance(action, ToLeader):
                self.up[i].append(action.message)
            elif isinstance(action, StartHoldTimer):
                worker.timer = action.hold
            elif isinstance(action, RunBeforeApply):
                worker.hook = action.hold
                if not self.slow_hooks:
                    self.run_hook(i, True)
            elif isinstance(action, Apply):
                worker.apply = action
                if not self.slow_apply:
                    self.end_apply(i, "applied")
            elif isinstance(action, Unpark | Leave | PollFails):
                assert worker.phase == "waiting", f"{action} without a poll"
                worker.phase, worker.timer, worker.hook, worker.cancelled = "between", 0, 0, False
                if isinstance(action, PollFails):
                    self.fail(i, action)
                elif isinstance(action, Leave) and action.outcome == "tainted":
                    worker.version = -1  # it reports none until the next update

    def fail(self, i: int, fails: PollFails) -> None:
        worker = self.workers[i]
        worker.phase, worker.outcome = "gone", "tainted" if fails.tainted else "clean"
        if not fails.tainted and any(other.version > worker.version for other in self.workers):
            self.fault = f"worker {i} fails clean on v{worker.version} while a peer has applied a newer one"

    @property
    def holds_all(self) -> bool:
        """A commit means that every byte is there."""
        return not self.direct and not self.small

    # Leader and coordinator ------------------------------------------------------------------------------

    def hear(self, i: int) -> None:
        message = self.up[i].pop(0)
        if message == CLOSED:
            self.lead(self.leader.worker_lost(i, "connection lost"))
        else:
            self.lead(getattr(self.leader, EVENTS[type(message)])(i, message))

    def lead(self, actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, ToWorkers):
                self.to_all(action.message)
            elif isinstance(action, ToCoordinator):
                self.coordinate(action.message)
            elif isinstance(action, EngineBroken):
                self.leader_lives = False
                self.to_all(CLOSED)
            else:
                self.outlive(action)

    def to_all(self, message: Any) -> None:
        for worker, channel in zip(self.workers, self.down, strict=True):
            if worker.outcome != "dead":
                channel.append(message)

    def coordinate(self, message: Any) -> None:
        if isinstance(message, Offer):
            self.asked, self.offer = True, message.offer
        elif isinstance(message, WithdrawOffer):
            if self.asked and self.offer == message.offer:
                self.asked = False
                self.lead(self.leader.refused(OfferRefused(message.offer, "taken back")))
        elif isinstance(message, Landed) and (self.direct or self.early):
            if any(not worker.outcome and worker.phase != "waiting" for worker in self.workers):
                self.fault = f"ticket {message.ticket} counts as landed while a worker is not parked"
        elif isinstance(message, Finished):
            self.open = 0
            self.finished.append(message.outcome)
            if self.direct:
                if len(self.finished) < self.num_tickets:
                    number = len(self.finished) + 1
                    self.lead(self.leader.announced(Announced(number, number, number)))
            else:
                self.all_vacant()

    def all_vacant(self) -> None:
        for i in range(len(self.workers)):
            self.lead(self.leader.vacant(i, Vacant(len(self.finished), parked=self.direct)))

    def grant(self) -> None:
        self.asked = False
        self.open, self.aborted = len(self.finished) + 1, False
        self.lead(self.leader.serve(Serve(self.open, self.open, ("e",))))
        self.land_whole_rings(self.open)

    def land_whole_rings(self, ticket: int) -> None:
        for i in range(0 if self.direct else len(self.workers)):
            if i not in self.small:
                self.lead(self.leader.landed(i, Landed(ticket)))

    def refuse_offer(self) -> None:
        self.asked = False
        self.lead(self.leader.refused(OfferRefused(self.offer, "nothing open")))

    def abort(self) -> None:
        self.budget["abort"] -= 1
        self.aborted = True
        self.lead(self.leader.ticket_aborted(TicketAborted(self.open, ("e",), "test")))

    def outlive(self, action: Any) -> None:
        raise AssertionError(f"{action} without a loss of the coordinator")

    # Judgement -----------------------------------------------------------------------------------------

    def bad(self) -> str:
        if not self.fault and len(self.finished) < self.num_tickets + 1:
            settled = not any(self.down) and not any(self.up) and not self.open
            versions = {w.version for w in self.workers if not w.outcome and w.phase != "waiting"}
            if settled and not any(w.apply for w in self.workers) and len(versions) > 1:
                return f"torn: versions {sorted(versions)} at rest"
        return self.fault

    def good_end(self) -> bool:
        gone = [worker for worker in self.workers if worker.outcome]
        if gone:
            return len(gone) == len(self.workers)
        changed = [t if o == "applied" else -1 for t, o in enumerate(self.finished, 1) if o != "aborted"]
        newest = changed[-1] if changed else 0
        return (
            len(self.finished) == self.num_tickets
            and all(w.version == newest and w.phase in ("between", "stepping") for w in self.workers)
            and not any(w.follower.flag for w in self.workers)
            and not any(self.down)
        )

    def normalise(self) -> None:
        """Only differences of poll indices matter: count from the slowest live worker."""
        base = min((w.follower.counter for w in self.workers if not w.outcome), default=0)
        if not base:
            return
        floor = -3  # anything older is as good as this old
        for worker in self.workers:
            f = worker.follower
            f.counter = max(f.counter - base, floor)
            f._promised = max(f._promised - base, floor)
            f._meet = None if f._meet is None else max(f._meet - base, floor)
        promises = self.leader._promises
        self.leader._promises = {w: max(i - base, floor) for w, i in promises.items()}
        for channel in (*self.up, *self.down):
            for k, message in enumerate(channel):
                if isinstance(message, Promise | Meet):
                    index = max(message.index - base, floor)
                    channel[k] = msgspec.structs.replace(message, index=index)
        self.ran = {step - base: version for step, version in self.ran.items() if step > base}
