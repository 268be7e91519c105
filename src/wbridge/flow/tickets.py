"""Tickets: who sends which version to whom, and when its source is free. Runs in the coordinator.

One object serves one epoch. Events in, actions out: each method takes what has happened and returns
what to send and which timers to start; it never waits and never looks at a clock.
"""

from __future__ import annotations

from collections.abc import Sequence

from wbridge.config import Delivery
from wbridge.flow.actions import (
    FromCoordinator,
    Recipient,
    StartDeadline,
    StartPatience,
    TicketsAction,
    To,
)
from wbridge.flow.calls import Calls, to_ranks
from wbridge.flow.messages import (
    AbortTicket,
    Announced,
    EngineOutcome,
    Finished,
    Landed,
    Offer,
    OfferRefused,
    Outcome,
    Overdue,
    Report,
    Retired,
    Serve,
    TicketAborted,
    TooLate,
    Waiting,
    WithdrawCall,
    WithdrawOffer,
)
from wbridge.flow.patience import Patience, lets_go
from wbridge.flow.records import EngineRecord, Fleet, TicketRecord


class Tickets:
    """Matches the ranks' sends, binds offers to tickets, retires sources and reports outcomes.

    `source_held`: direct sender staging; the send waits until the ticket is retired, and a cancelled one
    aborts it. `lands_when_parked`: direct receiver staging; with `latest`, engines offer only after the
    announcement.
    `shares_copies`: engines that are served together take one copy from the trainers.
    `num_calls`: sends that some rank has begun in earlier epochs; they are burnt for those that come to
    them only now.
    """

    def __init__(
        self,
        *,
        num_ranks: int,
        engines: Sequence[str],
        delivery: Delivery,
        source_held: bool,
        lands_when_parked: bool,
        shares_copies: bool = True,
        first_ticket: int = 1,
        num_calls: int = 0,
    ) -> None:
        self._calls = Calls(num_ranks, num_calls)
        self._engines = Fleet(engines)
        self._delivery = delivery
        self._patience = Patience(
            source_held=source_held, lands_when_parked=lands_when_parked, shares_copies=shares_copies
        )
        self._source_held = source_held
        self._lands_when_parked = lands_when_parked
        self._tickets: dict[int, TicketRecord] = {}  # those not over yet, oldest first
        self._next_is_due = False  # the ranks have a snapshot for their next call, which all have begun
        self._ended = ""
        self.next_ticket: int = first_ticket

    @property
    def quiet(self) -> bool:
        """No engine holds a grant: after `end`, the epoch may end."""
        return all(engine.grant is None for engine in self._engines)

    @property
    def settled(self) -> bool:
        """No grant is open, and no ticket waits for its first one; with `every`, for any."""
        every = self._delivery == "every"
        return not any(
            t.unfinished or not (t.closed or (t.started and not every)) for t in self._tickets.values()
        )

    def waits(self) -> tuple[list[tuple[int, int]], list[tuple[str, int]]]:
        """(rank, call) that others have begun without it; (engine, version) to land, to apply or to take."""
        to_all = self._delivery == "every" or self._source_held
        engines = [
            (e.name, t.version)
            for t in self._tickets.values()
            for e in self._engines.live()
            if t.waits(e, to_all)
        ]
        return self._calls.absent(), engines

    # Events of trainer ranks ---------------------------------------------------------------------

    def report(self, rank: int, report: Report) -> list[TicketsAction]:
        """A rank's source is ready; the last rank's report of a call makes it a ticket."""
        matched, out = self._calls.report(rank, report)
        if matched is not None:
            self._announce(matched, out)
        return self._settle(out)

    def waiting(self, rank: int, waiting: Waiting) -> list[TicketsAction]:
        """A rank finds no free snapshot; when all do, the newest ticket of `latest` closes."""
        return self._settle(self._calls.waiting(rank, waiting.call))

    def withdraw(self, rank: int, withdraw: WithdrawCall) -> list[TicketsAction]:
        """A rank's send was cancelled: burnt if not announced, else too late (direct sender: aborted)."""
        if self._calls.has_skipped(rank, withdraw.call):
            return []
        call = self._calls.count(rank, withdraw.call)
        announced = self._calls.announced.get(call)
        if announced is None:
            why = f"trainer rank {rank} cancelled send {call}"
            return self._settle(self._calls.burn(call, why, canceller=rank))
        ticket = self._tickets.get(announced)
        if self._source_held and ticket is not None and not ticket.retired:
            return self._abort_everywhere(ticket, f"trainer rank {rank} cancelled send {call}")
        return [to_ranks([rank], TooLate(withdraw.call, announced))]

    def abort(self, rank: int, abort: AbortTicket) -> list[TicketsAction]:
        """The application aborts: every grant that has not finished, landed ones too; the engine answers."""
        ticket = self._tickets.get(abort.ticket)
        if ticket is None:
            return []  # every engine is through with it
        return self._abort_everywhere(ticket, f"trainer rank {rank} aborted it: {abort.reason}")

    def lose_rank(self, rank: int, reason: str = "connection lost") -> list[TicketsAction]:
        """A trainer rank is gone: what has not landed never will, and no call can be completed."""
        why = f"trainer rank {rank} is lost: {reason}"
        out = self._calls.close(why, lost=rank)
        for ticket in self._tickets.values():
            if not ticket.retired:
                self._void(ticket, ticket.in_flight, why, out, everywhere=True)
                self._close(ticket, "aborted", out)
        return self._settle(out)

    # Events of engines -----------------------------------------------------------------------------

    def offer(self, engine: str, offer: Offer) -> list[TicketsAction]:
        """An engine can take a version. Answered by `Serve` or `OfferRefused`, at once or later."""
        if why := self._engines.why_no_offer(engine) or self._ended:
            return [To((("leader", engine),), OfferRefused(offer.offer, why))]
        self._engines[engine].make_offer(offer)
        return self._settle([])

    def withdraw_offer(self, engine: str, withdraw: WithdrawOffer) -> list[TicketsAction]:
        """The leader takes its offer back; nothing to say if it was served or refused already."""
        state = self._engines[engine]
        if state.offer != withdraw.offer:
            return []
        state.offer = None
        return self._settle([To((("leader", engine),), OfferRefused(withdraw.offer, "taken back"))])

    def landed(self, engine: str, landed: Landed) -> list[TicketsAction]:
        """All bytes are at the engine: the grant protects the source no longer."""
        ticket = self._tickets.get(landed.ticket)
        if ticket is None or engine not in ticket.in_flight:
            return []  # voided or lost in the meantime
        ticket.landed.add(engine)
        return self._settle([self._ranks(EngineOutcome(ticket.number, engine, "landed", False))])

    def finished(self, engine: str, finished: Finished) -> list[TicketsAction]:
        """The engine's answer to its grant. `applied` holds, even if we have aborted the grant meanwhile."""
        state = self._engines[engine]
        if state.grant is None or state.grant != finished.ticket:
            return []
        ticket = self._tickets[state.grant]
        out: list[TicketsAction] = []
        if finished.outcome != "applied" and engine in ticket.in_flight:
            # It gave up by itself: its writers must stop, and say so.
            why = f"engine {engine!r} {finished.outcome}: {finished.detail}"
            out.append(self._ranks(TicketAborted(ticket.number, (engine,), why)))
        self._finish(ticket, engine, finished.outcome, out)
        return self._settle(out)

    def lose_engine(self, engine: str, reason: str = "connection lost") -> list[TicketsAction]:
        """An engine, or a worker of it, is gone: its grant is void, and nobody waits for it."""
        state = self._engines[engine]
        if state.lost:
            return []
        state.lost, state.offer = True, None
        out: list[TicketsAction] = []
        for ticket in self._tickets.values():
            if engine not in ticket.final:
                if engine in ticket.unfinished:
                    self._void(ticket, {engine}, f"engine {engine!r} is lost: {reason}", out)
                self._finish(ticket, engine, "lost", out)
        return self._settle(out)

    # Timers, and the end of the epoch --------------------------------------------------------------

    def call_deadline_passed(self, call: int) -> list[TicketsAction]:
        """Give a send up that some rank has not made: for all ranks, which raise `BarrierTimeout`."""
        return self._settle(self._calls.deadline_passed(call))

    def patience_passed(self, ticket: int) -> list[TicketsAction]:
        """Serve who has offered; with `latest` the others missed it. None stays parked for one only due."""
        self._next_is_due = self._next_is_due and ticket != self.next_ticket
        for candidate in self._tickets.values():
            if candidate.timer == ticket and not candidate.closed:
                candidate.started = candidate.waited = True
        return self._settle([])

    def grace_passed(self, engine: str, served: int) -> list[TicketsAction]:
        """Others have waited for this engine for as long as a copy takes."""
        self._engines[engine].end_grace(served)
        return self._settle([])

    def update_deadline_passed(self, ticket: int) -> list[TicketsAction]:
        """Drop for this ticket who has not landed it; the ranks' sends raise `BarrierTimeout` naming them."""
        late = self._tickets.get(ticket)
        if late is None or late.retired:
            return []
        missing = {e.name for e in self._engines.live() if e.name in late.in_flight}
        if self._delivery == "every" or (self._source_held and not late.closed):
            missing |= {e.name for e in self._engines.live() if e.name not in late.granted | late.final}
        if not missing:
            return []
        names = self._engines.order(missing)
        why = f"version {late.version} (ticket {ticket}) has not landed in time on engines {', '.join(names)}"
        out: list[TicketsAction] = [self._ranks(Overdue(ticket, names, why))]
        self._void(late, missing & late.in_flight, why, out)
        for name in names:
            if name not in late.granted:
                self._finish(late, name, "missed", out)
        if self._source_held:
            self._close(late, "missed", out)
        return self._settle(out)

    def end(self, reason: str) -> list[TicketsAction]:
        """No more tickets and grants in this epoch; grants that are open go on until `quiet`."""
        self._ended = reason
        out = self._calls.close(reason)
        for ticket in self._tickets.values():
            self._close(ticket, "aborted", out)
        for engine in self._engines:
            self._refuse(engine, reason, out)
        return self._settle(out)

    # What follows from the state -------------------------------------------------------------------

    def _announce(self, report: Report, out: list[TicketsAction]) -> None:
        is_timed, self._next_is_due = self._next_is_due, False  # when it became due, its patience began
        number = timer = self.next_ticket
        self.next_ticket += 1
        if self._delivery == "latest":
            for old in self._tickets.values():
                if not old.closed and not old.started:
                    timer = old.timer  # engines that have waited for the old one are not made to wait anew
        ticket = TicketRecord(number, report, timer)
        self._calls.announced[report.call] = number
        leaders: list[Recipient] = [("leader", e.name) for e in self._engines.live()]
        message = Announced(number, report.version, report.call)
        out += self._calls.tell(self._calls.live, message, leaders)
        if timer == number and not is_timed:
            out.append(StartPatience(number))
        if self._delivery == "every" or self._source_held:
            out.append(StartDeadline(number))
        if self._delivery == "latest":
            for old in self._tickets.values():
                self._close(old, "superseded", out)
        self._tickets[number] = ticket
        for engine in self._engines:
            if engine.lost:
                self._finish(ticket, engine.name, "lost", out)

    def _settle(self, out: list[TicketsAction]) -> list[TicketsAction]:
        """Do all that has become possible: serve, close, retire, refuse, forget."""
        before = -1
        while before != len(out):
            before = len(out)
            for ticket in self._tickets.values():
                if not ticket.closed:
                    self._gather(ticket, out)
                    self._close_if_through(ticket, out)
                if ticket.closed and not ticket.retired and not ticket.in_flight:
                    ticket.retired = True
                    out.append(self._ranks(Retired(ticket.number)))
        self._next_is_due = self._next_is_due and self._calls.all_in_next()
        for engine in self._engines:
            if engine.offers_parked and self._wanted(engine) is None and not self._next_is_due:
                self._refuse(engine, "no open ticket waits for this engine", out)
        for number, ticket in list(self._tickets.items()):
            if ticket.retired and len(ticket.final) == len(self._engines):
                del self._tickets[number]
        return out

    def _gather(self, ticket: TicketRecord, out: list[TicketsAction]) -> None:
        due = [e for e in self._engines.live() if self._wanted(e) is ticket]
        ready = [e for e in due if e.offer is not None]
        absent = [e for e in due if e.offer is None]
        if ready:
            out += self._patience.begin_graces(ticket, absent)
            awaited = self._patience.awaited(ticket, absent)
            if not awaited or (self._out_of_snapshots(ticket) and not lets_go(awaited)):
                self._serve(ticket, ready, out)
        if ticket.waited and self._delivery == "latest" and (ticket.granted or not self._lands_when_parked):
            for engine in absent:
                if engine.name not in ticket.missed:
                    engine.misses += 1
                    ticket.missed.add(engine.name)
                    out.append(self._ranks(EngineOutcome(ticket.number, engine.name, "missed", False)))

    def _serve(self, ticket: TicketRecord, ready: list[EngineRecord], out: list[TicketsAction]) -> None:
        ready.sort(key=lambda engine: -engine.misses)
        names = tuple(engine.name for engine in ready)
        if not ticket.granted and self._delivery == "latest" and not self._source_held:
            out.append(StartDeadline(ticket.number))
        for engine in ready:
            engine.serve(ticket.number)
            ticket.granted.add(engine.name)
        ticket.started = True
        leaders: list[Recipient] = [("leader", name) for name in names]
        message = Serve(ticket.number, ticket.version, names, ticket.metadata)
        out.append(To((*self._all_ranks(), *leaders), message))

    def _close_if_through(self, ticket: TicketRecord, out: list[TicketsAction]) -> None:
        if self._delivery == "every":
            if all(e.name in ticket.landed | ticket.voided | ticket.final for e in self._engines.live()):
                self._close(ticket, "missed", out)
        elif self._out_of_snapshots(ticket):
            self._next_is_due = not ticket.granted
            out += [StartPatience(self.next_ticket)] if self._next_is_due else []
            self._close(ticket, "superseded", out)
        elif self._source_held and ticket.started and not ticket.in_flight:
            if ticket.granted or not self._lands_when_parked:
                self._close(ticket, "missed", out)
        elif not self._engines.live():
            self._close(ticket, "lost", out)

    def _out_of_snapshots(self, ticket: TicketRecord) -> bool:
        """All ranks wait for a snapshot in a later call, so nothing newer can come before this one goes."""
        return self._delivery == "latest" and self._calls.all_wait_after(ticket.call)

    def _close(self, ticket: TicketRecord, outcome: Outcome, out: list[TicketsAction]) -> None:
        if ticket.closed:
            return
        ticket.closed = True
        for engine in self._engines:
            if engine.name not in ticket.granted | ticket.final:
                self._finish(ticket, engine.name, "missed" if engine.name in ticket.missed else outcome, out)

    def _abort_everywhere(self, ticket: TicketRecord, reason: str) -> list[TicketsAction]:
        out: list[TicketsAction] = []
        self._void(ticket, ticket.unfinished - ticket.voided, reason, out, everywhere=True)
        self._close(ticket, "aborted", out)
        return self._settle(out)

    def _void(
        self,
        ticket: TicketRecord,
        engines: set[str],
        reason: str,
        out: list[TicketsAction],
        *,
        everywhere: bool = False,
    ) -> None:
        if not engines and not everywhere:
            return
        names = self._engines.order(engines)
        leaders: list[Recipient] = [("leader", name) for name in names]
        message = TicketAborted(ticket.number, names, reason, everywhere)
        out.append(To((*self._all_ranks(), *leaders), message))
        ticket.voided |= engines

    def _finish(self, ticket: TicketRecord, name: str, outcome: Outcome, out: list[TicketsAction]) -> None:
        ticket.final.add(name)
        if self._engines[name].grant == ticket.number:
            self._engines[name].finish(outcome)
        out.append(self._ranks(EngineOutcome(ticket.number, name, outcome, True)))

    def _refuse(self, engine: EngineRecord, reason: str, out: list[TicketsAction]) -> None:
        if engine.offer is not None:
            out.append(To((("leader", engine.name),), OfferRefused(engine.offer, reason)))
            engine.offer = None

    def _wanted(self, engine: EngineRecord) -> TicketRecord | None:
        """The ticket that this engine's offer is bound to: the oldest open one it was not served
        (in `latest` only the newest is open)."""
        for ticket in self._tickets.values():
            if not ticket.closed and engine.name not in ticket.granted | ticket.final:
                return ticket
        return None

    def _all_ranks(self) -> tuple[Recipient, ...]:
        return tuple(("rank", rank) for rank in self._calls.live)

    def _ranks(self, message: FromCoordinator) -> To:
        return to_ranks(self._calls.live, message)
