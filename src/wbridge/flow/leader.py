"""Leader: speaks for one engine to the coordinator, and lines its workers up at one poll index.

It runs in the worker at mesh coordinate 0. Grants and aborts reach the workers only through it, over
connections that keep order, so that the engine decides as one. Events in, actions out.
"""

from __future__ import annotations

from typing import Literal

from wbridge.flow.actions import (
    EngineBroken,
    LeaderAction,
    Separated,
    StartGrantTimer,
    ToCoordinator,
    ToWorkers,
)
from wbridge.flow.messages import (
    Announced,
    Commit,
    Done,
    Finished,
    Hold,
    Landed,
    Meet,
    Offer,
    OfferRefused,
    Promise,
    Ready,
    Refuse,
    Release,
    Serve,
    TicketAborted,
    Vacant,
    WithdrawHold,
    WithdrawOffer,
    WorkerApplied,
)

EngineOutcome = Literal["applied", "aborted", "tainted"]


class Leader:
    """The engine's side of offers and grants, and the hold: promise, meet, ready, commit, done.

    It offers when all rings are vacant and holds when each is as full as it gets: what has not landed by
    the commit passes through while the engine is parked. If some worker takes versions only while parked, an
    announced ticket makes it hold the workers, the offer goes out when all are ready, and the grant is the
    commit.

    `lands_when_parked`: direct receiver staging; the coordinator hears that a version has landed only once
    the workers stand still for it, wherever its bytes are.
    """

    def __init__(self, num_workers: int, *, lands_when_parked: bool, max_poll_skew: int) -> None:
        self._num_workers = num_workers
        self._lands_when_parked = lands_when_parked
        self._max_poll_skew = max_poll_skew
        self._phase: Literal["idle", "holding", "meeting", "offering", "committed"] = "idle"
        self._hold = 0  # ids are never reused, over all epochs
        self._promises: dict[int, int] = {}
        self._ready: set[int] = set()
        self._applied: dict[int, WorkerApplied] = {}
        self._broken = ""
        self._next_offer = 1
        self._leaving = False
        self._forget_membership()

    def _forget_membership(self) -> None:
        self._connected = True
        self._offer = 0
        self._takes_back = ""  # why the offer is being taken back
        self._refused = False
        self._grant: Serve | None = None
        self._full: set[int] = set()  # have landed as much as they can before an apply
        self._landed: set[int] = set()
        self._vacant: dict[int, int] = {}  # by worker, once it has said how it takes versions
        self._parked = False  # some worker takes them only while all stand still
        self._num_ended = 0
        self._announced = 0
        self._answered = 0  # direct: what was announced up to here needs no hold any more

    def enter(self, *, lands_when_parked: bool) -> None:
        """Another membership begins, and nothing of the one before is under way."""
        self._lands_when_parked = lands_when_parked

    # Events from the coordinator ---------------------------------------------------------------------

    def announced(self, message: Announced) -> list[LeaderAction]:
        """A ticket exists. Who takes it parked lines up for it."""
        self._announced = max(self._announced, message.ticket)
        return self._go_on([])

    def serve(self, message: Serve) -> list[LeaderAction]:
        """Our offer is answered by a grant. If we have parked for it, this is the commit."""
        waiting = self._phase == "offering" if self._parked else self._offer != 0 and self._grant is None
        if not waiting or self._broken:
            why = "the engine is not waiting for a grant"
            return [ToCoordinator(Finished(message.ticket, "aborted", why))]
        self._offer, self._takes_back = 0, ""
        self._grant, self._full, self._landed = message, set(), set()
        self._answered = max(self._answered, message.ticket)
        out: list[LeaderAction] = [ToWorkers(message)]
        if self._parked:
            self._commit(out)
        return out

    def refused(self, message: OfferRefused) -> list[LeaderAction]:
        """Our offer is answered by a refusal. If we have parked for it, let the workers go."""
        if message.offer != self._offer:
            return []
        self._offer, why = 0, self._takes_back or message.reason
        out: list[LeaderAction] = []
        if self._parked:
            if not self._takes_back:
                self._answered = self._announced
            self._takes_back = ""
            self._release(why, out)
        else:
            self._refused = True  # the epoch is ending; it would be refused again
        return self._go_on(out)

    def ticket_aborted(self, message: TicketAborted) -> list[LeaderAction]:
        """Void the grant, unless a commit can still complete: then the engine answers `applied`."""
        if self._grant is None or self._grant.ticket != message.ticket:
            return []
        out: list[LeaderAction] = []
        self._abort_grant(message, out)
        return self._go_on(out)

    def coordinator_lost(self) -> list[LeaderAction]:
        """No more grants; parked workers without a grant are let go. A grant may still complete."""
        self._connected = False
        self._offer, self._takes_back = 0, ""
        self._answered = self._announced
        out: list[LeaderAction] = []
        if self._grant is None and self._phase != "idle":
            self._release("the coordinator is lost", out)
        if self._grant is not None and not self._all_landed:
            out.append(StartGrantTimer(self._grant.ticket))
        return out

    def grant_timed_out(self, ticket: int) -> list[LeaderAction]:
        """A grant that perhaps reached only us has not completed: give it up."""
        if self._connected or self._grant is None or self._grant.ticket != ticket or self._all_landed:
            return []
        return self.ticket_aborted(
            TicketAborted(ticket, (), "the coordinator is lost and the bytes do not come")
        )

    def leave(self) -> list[LeaderAction]:
        """The membership or the incarnation changes: end all that is under way, except a commit.

        `Separated` follows, at once or when an outstanding commit has completed; until then, and until
        the workers have followed, the engine accepts nothing of the new one.
        """
        self._leaving = True
        out: list[LeaderAction] = []
        if self._grant is not None:
            why = "the membership changed"
            self._abort_grant(TicketAborted(self._grant.ticket, (), why), out)
        elif self._phase != "idle":
            self._release("the membership changed", out)
        return self._go_on(out)

    # Events from the workers, this one included ------------------------------------------------------

    def vacant(self, worker: int, message: Vacant) -> list[LeaderAction]:
        """A worker's ring is free again, or the worker tells that it takes versions when parked."""
        self._vacant[worker] = message.grants
        self._parked = self._parked or message.parked
        return self._go_on([])

    def landed(self, worker: int, message: Landed) -> list[LeaderAction]:
        """A worker's ring is full, or it has all its bytes. When all have all, the coordinator hears it, and
        when all rings are full, the workers line up."""
        if self._grant is None or self._grant.ticket != message.ticket or worker in self._landed:
            return []
        self._full.add(worker)
        if not message.whole:
            return self._go_on([])
        self._landed.add(worker)
        out: list[LeaderAction] = []
        if self._all_landed and (self._phase == "committed" or not self._lands_when_parked):
            out.append(ToCoordinator(Landed(message.ticket)))
        return self._go_on(out)

    def promise(self, worker: int, message: Promise) -> list[LeaderAction]:
        """A worker's next poll index. The highest becomes the meeting point."""
        if message.hold != self._hold or self._phase != "holding":
            return []
        self._promises[worker] = message.index
        if len(self._promises) < self._num_workers:
            return []
        first, last = min(self._promises.values()), max(self._promises.values())
        if last - first > self._max_poll_skew:
            listed = ", ".join(f"worker {w}: poll {i}" for w, i in sorted(self._promises.items()))
            why = (
                f"polls are more than max_poll_skew = {self._max_poll_skew} apart ({listed}); "
                "all workers of an engine must poll equally often"
            )
            out: list[LeaderAction] = []
            self._release(why, out, protocol_error=True)
            self._broken = why
            return out
        self._phase = "meeting"
        return [ToWorkers(Meet(self._hold, last))]

    def ready(self, worker: int, message: Ready) -> list[LeaderAction]:
        """A worker stands at the meeting point. When all do: commit, or offer."""
        if message.hold != self._hold or self._phase != "meeting":
            return []
        self._ready.add(worker)
        out: list[LeaderAction] = []
        if len(self._ready) == self._num_workers:
            if self._parked:
                self._phase = "offering"
                self._send_offer(out)
            else:
                self._commit(out)
        return out

    def refuse(self, worker: int, message: Refuse) -> list[LeaderAction]:
        """A worker's `before_apply` refused: nobody applies now."""
        return self._let_go(message.hold, f"worker {worker} refused: {message.reason}")

    def withdraw(self, worker: int, message: WithdrawHold) -> list[LeaderAction]:
        """A parked poll was cancelled or has waited too long. After a commit it is ignored."""
        return self._let_go(message.hold, f"worker {worker}: {message.reason}")

    def applied(self, worker: int, message: WorkerApplied) -> list[LeaderAction]:
        """A worker has answered a commit. When all have, the engine answers as one."""
        if message.hold != self._hold or self._phase != "committed" or self._grant is None:
            return []
        self._applied[worker] = message
        if len(self._applied) < self._num_workers:
            return []
        outcomes = {answer.outcome for answer in self._applied.values()}
        outcome: EngineOutcome = outcomes.pop() if len(outcomes) == 1 else "tainted"
        detail = "; ".join(f"worker {w}: {a.detail}" for w, a in sorted(self._applied.items()) if a.detail)
        self._phase = "idle"
        out: list[LeaderAction] = [ToWorkers(Done(self._hold, outcome))]
        self._end_grant(outcome, detail, out)
        return self._go_on(out)

    def worker_lost(self, worker: int, reason: str) -> list[LeaderAction]:
        """A worker is gone, and the engine with it. Before a commit the others are released first."""
        if self._broken:
            return []
        why = f"worker {worker} is lost: {reason}"
        out: list[LeaderAction] = []
        if self._phase not in ("idle", "committed"):
            self._release(why, out)
        self._broken = why
        return [*out, EngineBroken(why)]

    # What follows from the state -----------------------------------------------------------------------

    @property
    def _all_landed(self) -> bool:
        return len(self._landed) == self._num_workers

    def _go_on(self, out: list[LeaderAction]) -> list[LeaderAction]:
        """Start what has become possible: separate, offer, or hold."""
        if self._broken:
            return out
        if self._leaving:
            if self._phase == "idle" and self._grant is None:
                self._forget_membership()
                self._leaving = False
                out.append(Separated())
            return out
        if len(self._vacant) < self._num_workers:
            return out
        if self._parked:
            due = self._connected and self._announced > self._answered
        else:
            due = self._grant is not None and len(self._full) == self._num_workers
            if self._grant is None and self._connected and not self._offer and not self._refused:
                vacant = list(self._vacant.values())
                if vacant == [self._num_ended] * self._num_workers:
                    self._send_offer(out)
        if due and self._phase == "idle":
            self._hold += 1
            self._phase = "holding"
            self._promises, self._ready = {}, set()
            out.append(ToWorkers(Hold(self._hold)))
        return out

    def _send_offer(self, out: list[LeaderAction]) -> None:
        self._offer = self._next_offer
        self._next_offer += 1
        out.append(ToCoordinator(Offer(self._offer, parked=self._parked)))

    def _commit(self, out: list[LeaderAction]) -> None:
        assert self._grant is not None, "a commit without a grant"
        self._phase = "committed"
        self._applied = {}
        lag = max(0, self._announced - self._grant.ticket)
        out.append(ToWorkers(Commit(self._hold, self._grant.ticket, self._grant.version, lag)))
        if self._all_landed and self._lands_when_parked:
            out.append(ToCoordinator(Landed(self._grant.ticket)))

    def _let_go(self, hold: int, why: str) -> list[LeaderAction]:
        if hold != self._hold or self._phase in ("idle", "committed"):
            return []
        if self._phase == "offering":  # the offer must be answered first: the grant may be on its way
            if self._takes_back:
                return []
            self._takes_back = why
            return [ToCoordinator(WithdrawOffer(self._offer))]
        out: list[LeaderAction] = []
        self._release(why, out)
        return self._go_on(out)

    def _release(self, why: str, out: list[LeaderAction], *, protocol_error: bool = False) -> None:
        answered = self._ready if self._phase == "meeting" else set(self._promises)
        if self._phase in ("holding", "meeting"):
            missing = [str(w) for w in range(self._num_workers) if w not in answered]
            why += f" (still missing: worker {', '.join(missing)})" if missing else ""
        self._phase = "idle"
        out.append(ToWorkers(Release(self._hold, why, protocol_error)))

    def _abort_grant(self, message: TicketAborted, out: list[LeaderAction]) -> None:
        if self._phase == "committed":
            if not self._all_landed:  # the missing bytes will not come; the workers' answers decide
                out.append(ToWorkers(message))
            return
        out.append(ToWorkers(message))
        if self._phase != "idle":
            self._release(f"ticket {message.ticket} was aborted: {message.reason}", out)
        self._end_grant("aborted", message.reason, out)

    def _end_grant(self, outcome: EngineOutcome, detail: str, out: list[LeaderAction]) -> None:
        assert self._grant is not None, "no grant to end"
        out.append(ToCoordinator(Finished(self._grant.ticket, outcome, detail)))
        self._grant = None
        self._num_ended += 1
