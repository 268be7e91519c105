"""Publishing: drives the pure ticket machine of one epoch with real members and real time."""

from __future__ import annotations

import heapq
import math

import anyio

from wbridge.config import Config
from wbridge.control.membership import Member
from wbridge.control.messages import FlowMessage, Keyed, Message
from wbridge.control.planning import Roster
from wbridge.errors import ProtocolError
from wbridge.flow import messages as flow
from wbridge.flow.actions import (
    Recipient,
    StartCallDeadline,
    StartDeadline,
    StartGrace,
    StartPatience,
    TicketsAction,
    To,
)
from wbridge.flow.standings import Standings
from wbridge.flow.tickets import Tickets
from wbridge.ids import Epoch


class Cohort:
    """The members that are told to start one epoch."""

    def __init__(self, epoch: Epoch, roster: Roster) -> None:
        self.epoch = epoch
        self.roster = roster
        self.members: frozenset[Member] = frozenset(roster.members)
        self.ready: set[Member] = set()
        self.lost: set[Member] = set()
        self.num_calls = 0
        """The sends that some rank has begun in earlier epochs."""

    @property
    def is_ready(self) -> bool:
        return self.ready >= self.members

    def tell(self, message: Message) -> None:
        for member in self.roster.members:
            if member not in self.lost:
                member.lease.post(message)


class Publishing:
    """The tickets of one live epoch. The owner starts `run` and hands over what members say and suffer."""

    def __init__(
        self,
        config: Config,
        cohort: Cohort,
        standings: Standings,
        *,
        shares_copies: bool,
        first_ticket: int,
    ) -> None:
        roster = cohort.roster
        self.cohort = cohort
        self._config = config
        self._standings = standings
        self._tickets = Tickets(
            num_ranks=len(roster.ranks),
            engines=tuple(roster.engines),
            delivery=config.effective_delivery,
            source_held=config.source_held,
            lands_when_parked=config.lands_when_parked,
            shares_copies=shares_copies,
            first_ticket=first_ticket,
            num_calls=cohort.num_calls,
        )
        self._timers: list[tuple[float, int, TicketsAction]] = []
        self._num_timers = 0
        self._scope = anyio.CancelScope()
        self._changed: anyio.Event | None = None  # while somebody waits for it
        self._next_timer = anyio.Event()
        self._lost: set[str] = set()
        self._served: dict[str, tuple[int, float]] = {}  # engine: the ticket it was granted, and when
        self._copy_s = config.relay_patience_s  # what a version took to arrive last, once one has
        self.announced: int | None = None
        """The version announced last in this epoch."""

    @property
    def next_ticket(self) -> int:
        return self._tickets.next_ticket

    def receive(self, member: Member, message: FlowMessage) -> None:
        """Act on what a rank or a leader says.

        Raises:
            ProtocolError: nobody in its place says that.
        """
        worker = member.worker
        if worker.role == "trainer":
            actions = self._from_rank(worker.rank, message)
        else:
            actions = self._from_leader(worker.group, message) if worker.is_leader else None
        if actions is None:
            raise ProtocolError(
                f"{member} sent {type(message).__name__}, which the coordinator expects of others"
            )
        self._perform(actions)

    def _from_rank(self, rank: int, message: FlowMessage) -> list[TicketsAction] | None:
        match message:
            case flow.Report():
                return self._tickets.report(rank, message)
            case flow.Waiting():
                return self._tickets.waiting(rank, message)
            case flow.WithdrawCall():
                return self._tickets.withdraw(rank, message)
            case flow.AbortTicket():
                return self._tickets.abort(rank, message)
        return None

    def _from_leader(self, engine: str, message: FlowMessage) -> list[TicketsAction] | None:
        match message:
            case flow.Offer():
                return self._tickets.offer(engine, message)
            case flow.WithdrawOffer():
                return self._tickets.withdraw_offer(engine, message)
            case flow.Landed():
                return self._tickets.landed(engine, message)
            case flow.Finished():
                return self._tickets.finished(engine, message)
        return None

    def lose(self, member: Member, reason: str) -> None:
        """A member of the epoch is gone; an engine goes as a whole."""
        worker = member.worker
        if worker.role == "trainer":
            self._perform(self._tickets.lose_rank(worker.rank, reason))
        elif worker.group not in self._lost:
            self._lost.add(worker.group)
            self._standings.lose(worker.group)
            self._perform(self._tickets.lose_engine(worker.group, f"{worker}: {reason}"))

    def end(self, reason: str) -> None:
        """Give no more tickets and grants."""
        self._perform(self._tickets.end(reason))

    async def wait_quiet(self) -> None:
        """Wait until no engine holds a grant."""
        while not self._tickets.quiet:
            await self._wait_changed()

    async def wait_settled(self) -> None:
        """Wait until no engine would lose a version by the end of the epoch."""
        while not self._tickets.settled:
            await self._wait_changed()

    async def _wait_changed(self) -> None:
        self._changed = self._changed or anyio.Event()
        await self._changed.wait()

    @property
    def grants(self) -> dict[str, tuple[int, int]]:
        """The ticket and version that each engine holds and has not finished."""
        return self._standings.grants

    def waiting_for(self) -> tuple[str, ...]:
        """Name the ranks that have not made a call which others have begun, and the engines that have a
        version to land, to apply, or to offer to take."""
        ranks, engines = self._tickets.waits()
        return tuple(
            f"{self.cohort.roster.ranks[rank].worker} (send {call})" for rank, call in ranks
        ) + tuple(f"engine {name} (version {version})" for name, version in engines)

    async def run(self) -> None:
        """Keep the time for the tickets until `stop` or cancellation."""
        with self._scope:
            while True:
                deadline_s = self._timers[0][0] if self._timers else math.inf
                self._next_timer = anyio.Event()
                with anyio.CancelScope(deadline=deadline_s):
                    await self._next_timer.wait()
                while self._timers and self._timers[0][0] <= anyio.current_time():
                    self._fire(heapq.heappop(self._timers)[2])

    def stop(self) -> None:
        self._scope.cancel()

    def _fire(self, timer: TicketsAction) -> None:
        match timer:
            case StartPatience(ticket):
                self._perform(self._tickets.patience_passed(ticket))
            case StartGrace(engine, served):
                self._perform(self._tickets.grace_passed(engine, served))
            case StartDeadline(ticket):
                self._perform(self._tickets.update_deadline_passed(ticket))
            case StartCallDeadline(call):
                self._perform(self._tickets.call_deadline_passed(call))

    def _perform(self, actions: list[TicketsAction]) -> None:
        told: dict[Member, list[Keyed]] = {}  # all that one gets travels together
        for action in actions:
            match action:
                case To(recipients, message):
                    self._note(message)
                    for recipient in recipients:
                        keyed = Keyed(self.cohort.epoch, message)
                        told.setdefault(self._find(recipient), []).append(keyed)
                case StartPatience():
                    self._start(action, self._config.relay_patience_s)
                case StartGrace():
                    self._start(action, self._grace_s)
                case StartDeadline() | StartCallDeadline():
                    self._start(action, self._config.update_timeout_s)
        for member, messages in told.items():
            member.lease.post(*messages)
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    def _start(self, timer: TicketsAction, delay_s: float) -> None:
        self._num_timers += 1  # keeps the heap from comparing actions
        entry = (anyio.current_time() + delay_s, self._num_timers, timer)
        heapq.heappush(self._timers, entry)
        if self._timers[0] is entry:
            self._next_timer.set()

    def _find(self, recipient: Recipient) -> Member:
        if recipient[0] == "rank":
            return self.cohort.roster.ranks[recipient[1]]
        return self.cohort.roster.engines[recipient[1]][0]

    def _note(self, message: FlowMessage) -> None:
        """Keep what `status` and the end of the epoch need to know."""
        self._standings.note(message)
        if isinstance(message, flow.Announced):
            self.announced = message.version
        elif isinstance(message, flow.Serve):
            self._served |= dict.fromkeys(message.engines, (message.ticket, anyio.current_time()))
        elif isinstance(message, flow.EngineOutcome) and message.outcome == "landed":
            self._measure(self._served.get(message.engine, (0, 0.0)), message.ticket)

    def _measure(self, served: tuple[int, float], landed: int) -> None:
        """Of those served together, the engine that has it first says how long a copy takes: the others may
        have been asleep. An outage says nothing of the next version, so a long time counts by doubling."""
        if served[0] == landed:
            at_most_s = max(self._config.relay_patience_s, 2 * self._copy_s)
            self._copy_s = min(anyio.current_time() - served[1], at_most_s)
            self._served = {name: other for name, other in self._served.items() if other != served}

    @property
    def _grace_s(self) -> float:
        """As long as a copy takes, if that leaves time for the copy before an update times out."""
        return max(0.0, min(self._copy_s, (self._config.update_timeout_s - self._copy_s) / 2))
