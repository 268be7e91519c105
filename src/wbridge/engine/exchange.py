"""ExchangeMember: what a rollout worker does as one that gets groups from others, and passes them on."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import anyio
import anyio.abc

from wbridge.engine.relay import Relay
from wbridge.errors import InternalError
from wbridge.flow.messages import Alive, Credit, Stopped, Unwanted
from wbridge.flow.ring import Incoming
from wbridge.ids import WorkerId
from wbridge.plan.routes import iter_hops, partners_of
from wbridge.plan.types import Exchange, Group

SIGNS_PER_PATIENCE = 4
"""How often those that wait for each other give a sign in `relay_patience_s`."""

GAPS_OF_PATIENCE = 3
"""Signs queue behind bytes, so on a slow link patience lasts so many times the longest gap there was. With
each ticket gaps of earlier ones count half: it may have been a worker that stood still, not the link."""

FIRST_PATIENCES = 4
"""Before anything is known of a link, patience lasts so many times as long."""


class _Routes:
    """What this worker gets from others, and passes on to others, in one serving set."""

    def __init__(self) -> None:
        self.sources: dict[int, str] = {}  # by group
        self.duties: dict[int, dict[str, int]] = {}  # by group: receivers, and which of theirs it is


class ExchangeMember:
    """Knows from whom each group of the current ticket comes, and turns to the trainers where that fails.

    `reassign` is called with each (ticket, group, piece, writer) that another writer is to bring, `tell` with
    what is to be sent to another member, `give_up` with a ticket that cannot be landed, and why.
    """

    def __init__(
        self,
        worker: WorkerId,
        exchanges: tuple[Exchange, ...],
        groups: tuple[Group, ...],
        relay: Relay,
        *,
        patience_s: float,
        reassign: Callable[[int, int, int, str], None],
        tell: Callable[[str, Alive | Unwanted], None],
        give_up: Callable[[int, str], None],
    ) -> None:
        self._worker = worker
        self._exchanges = exchanges
        self._groups = groups
        self.relay: Relay = relay
        self._patience_s = patience_s
        self._reassign, self._tell, self._give_up = reassign, tell, give_up
        self._names = {m: str(m) for exchange in exchanges for m in partners_of(exchange, worker)}
        self._members = set(self._names.values())
        self._routes: tuple[frozenset[str], _Routes] = frozenset(), _Routes()
        self._ticket = 0
        self._sources: dict[int, str] = {}  # by group: the member that is to bring it
        self._owed: dict[str, set[tuple[int, int]]] = {}  # credits that are not served yet, by writer
        self._stops: dict[int, set[str]] = {}  # members that have stopped before their ticket was granted
        self._late: set[str] = set()  # members that are bypassed and may write all the same
        self._distrusted: set[str] = set()  # members that are bypassed when they have stopped
        self._lost: set[str] = set()
        self._cut: set[str] = set()  # members that live, and that nothing reaches any more
        self._heard_s: dict[str, float] = {}
        self._longest_s: dict[str, float] = {}  # between two signs, while something was to come
        self._busy = anyio.Event()

    async def run(self) -> None:
        """Pass on, and watch over those that are waited for, until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.relay.run)
            while True:
                await self._busy.wait()
                await anyio.sleep(self._patience_s / SIGNS_PER_PATIENCE)  # the beat of the signs
                self._look_around()
        raise InternalError(f"{self._worker} has ended by itself to pass weights on; please report it")

    def serve(self, ticket: int, engines: Iterable[str]) -> tuple[Incoming, ...]:
        """Take a grant: return who is to write what. `engines` take the ticket together."""
        routes = self._routes_among(frozenset(engines))
        self._ticket = ticket
        self._owed.clear()
        self._late.clear()
        self._distrusted.clear()
        gone = self._lost.union(self._cut, self._stops.get(ticket, ()))
        self._stops = {later: own for later, own in self._stops.items() if later > ticket}
        self._sources = {group: source for group, source in routes.sources.items() if source not in gone}
        lost = self._lost
        self.relay.serve(
            ticket,
            {g: {r: k for r, k in own.items() if r not in lost} for g, own in routes.duties.items()},
        )
        now_s = anyio.current_time()
        self._heard_s = dict.fromkeys(self._members, now_s)
        self._longest_s = {member: gap_s / 2 for member, gap_s in self._longest_s.items()}
        return tuple(
            Incoming(tuple(self._sources.get(g.index, str(piece.writer)) for piece in g.pieces), g.stage)
            for g in self._groups
        )

    def _routes_among(self, engines: frozenset[str]) -> _Routes:
        """Most versions are taken by the same engines."""
        if self._routes[0] != engines:
            found = _Routes()
            for hop in iter_hops(self._exchanges, engines):
                if hop.receiver == self._worker:
                    found.sources[hop.received] = self._names[hop.sender]
                elif hop.sender == self._worker:
                    found.duties.setdefault(hop.sent, {})[self._names[hop.receiver]] = hop.received
            self._routes = engines, found
        return self._routes[1]

    def end(self, ticket: int) -> None:
        """The grant is void: nobody is to bring anything for it, and nothing is passed on."""
        if ticket == self._ticket:
            for member in sorted(set(self._sources.values())):
                self._tell(member, Unwanted(ticket))
            self._sources.clear()
            self._owed.clear()
            self.relay.end()

    # What other members do ----------------------------------------------------------------------------

    def credited(self, writer: str, group: int, piece: int) -> None:
        """A credit of the current ticket is on its way."""
        if not self._owed.get(writer):
            self._heard_s[writer] = anyio.current_time()  # before, it owed nothing
        self._owed.setdefault(writer, set()).add((group, piece))
        if writer in self._members:
            self._busy.set()

    def heard(self, peer: str) -> None:
        """A sign of life."""
        if peer in self._members:
            now_s = anyio.current_time()
            if self._owed.get(peer):
                gap_s = now_s - self._heard_s[peer]
                self._longest_s[peer] = max(self._longest_s.get(peer, 0.0), gap_s)
            self._heard_s[peer] = now_s

    def arrived(self, ticket: int, writer: str, group: int, piece: int) -> None:
        if ticket == self._ticket and writer in self._owed:
            self._owed[writer].discard((group, piece))

    def verified(self, ticket: int, group: int, piece: int, slot: int, kept: memoryview, total: int) -> None:
        """A piece of ours is there and right: it is passed on."""
        if first := self.relay.verified(ticket, group, piece, slot, kept, total):
            self._busy.set()
            self._heard_s |= dict.fromkeys(first, anyio.current_time())

    def credit(self, peer: str, credit: Credit) -> None:
        """Another member lets us write."""
        self.relay.credit(peer, credit)
        self._busy.set()

    def unwanted(self, peer: str, ticket: int) -> None:
        self.relay.drop(peer, ticket)

    def stopped(self, writer: str, stopped: Stopped) -> None:
        """A member that passes nothing on any more is bypassed at once."""
        if writer in self._members:
            if stopped.ticket == self._ticket:
                self._bypass(writer)
                self._late.discard(writer)
            elif stopped.ticket > self._ticket:
                self._stops.setdefault(stopped.ticket, set()).add(writer)

    def are_late(self, writers: Iterable[str]) -> bool:
        """Whether all of these are bypassed, so that nobody is to wait for them any more."""
        return self._late.issuperset(writers)

    def distrust(self, writer: str, group: int, piece: int) -> bool:
        """What a relay has brought is not what the trainer sent: the trainers bring the rest of it once it
        has stopped, since what it still writes may be as wrong, and come last. False: nothing can be done."""
        if self._sources.get(group) == writer:
            self._owed.setdefault(writer, set()).add((group, piece))
            self._distrusted.add(writer)
            self._tell(writer, Unwanted(self._ticket))
            self._busy.set()
        return writer in self._members and writer not in self._late

    def lose(self, peer: str) -> None:
        """A worker is gone."""
        if peer in self._members:
            self._lost.add(peer)
            self.relay.lose(peer)
            self._do_without(peer)

    def cut_off(self, peer: str) -> None:
        """Nothing that we send reaches it any more, not even that we wait for it."""
        if peer in self._members and peer not in self._cut:
            self._cut.add(peer)
            self._do_without(peer)

    # Patience -------------------------------------------------------------------------------------------

    def _bypass(self, relay: str) -> None:
        """Have the trainers bring what this member was to."""
        self._owed.pop(relay, None)
        self._late.add(relay)
        moved = [group for group, source in self._sources.items() if source == relay]
        for group in moved:
            del self._sources[group]
        for group in moved:
            for k, piece in enumerate(self._groups[group].pieces):
                self._reassign(self._ticket, group, k, str(piece.writer))

    def _do_without(self, relay: str) -> None:
        """Have the trainers bring what this member was to, unless that may be overwritten by wrong bytes."""
        if relay in self._distrusted:
            why = f"{self._worker}: {relay} brought bytes that were not the trainer's, and has not stopped"
            self._give_up(self._ticket, f"{why}; send the version again")
        self._bypass(relay)

    def _is_silent(self, member: str) -> bool:
        longest_s = self._longest_s.get(member)
        if longest_s is None:
            patience_s = FIRST_PATIENCES * self._patience_s
        else:
            patience_s = max(self._patience_s, GAPS_OF_PATIENCE * longest_s)
        return anyio.current_time() - self._heard_s[member] >= patience_s

    def _look_around(self) -> None:
        """Give a sign to those that wait, and give up those that do not.

        Who cannot take what it is to pass on, for want of a slot, gives none: others need not wait for that.
        """
        for member in sorted(self._owing):
            if self._is_silent(member):
                self._do_without(member)
                self._tell(member, Unwanted(self._ticket))
        for member in sorted(self.relay.kept_for):
            if self._is_silent(member):
                self.relay.drop(member)
        is_moving = any(self._owed.values())
        waiting = self._owing | (self.relay.awaited_by if is_moving else self.relay.writing_to)
        for member in sorted(waiting - self._lost):
            self._tell(member, Alive(self._ticket))
        if not (self._owing or self.relay.awaited_by or self.relay.kept_for):
            self._busy = anyio.Event()

    @property
    def _owing(self) -> set[str]:
        return {writer for writer, owed in self._owed.items() if owed and writer in self._members}
