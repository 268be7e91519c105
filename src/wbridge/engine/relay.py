"""Relay: passes verified pieces of a ticket on to other members of an exchange."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import anyio
import anyio.abc
import msgspec

from wbridge.device.base import Event
from wbridge.engine.context import RelayContext
from wbridge.engine.puts import Puts
from wbridge.errors import InternalError
from wbridge.flow.messages import Credit
from wbridge.plan.types import Group, Piece
from wbridge.staging.relay import KeptPieces

Duty = tuple[str, int, int]
"""A piece for somebody: receiver, group, piece."""


class _Passing:
    """What is passed on of one ticket."""

    def __init__(self, receivers: Mapping[int, set[str]]) -> None:
        self.receivers = receivers  # by group
        self.source: KeptPieces | None = None
        self.credits: dict[Duty, Credit] = {}  # for what has not arrived here yet
        self.pieces: dict[Duty, tuple[Piece, int]] = {}  # what has, and its checksum
        self.duty_of: dict[int, Duty] = {}  # by the identity of the piece
        self.slots: dict[Duty, int] = {}  # where it is kept
        self.reading: set[Duty] = set()
        self.flying: set[Duty] = set()

    @property
    def is_over(self) -> bool:
        return not (self.slots or self.flying)


class Relay:
    """The duties of one rollout worker, in the ticket that it takes now.

    A piece is kept in its slot for each duty until it has been copied out, or the duty is dropped: `keep` and
    `let_go` are called with the slot each time.
    """

    def __init__(
        self,
        context: RelayContext,
        groups: tuple[Group, ...],
        *,
        keep: Callable[[int], None],
        let_go: Callable[[int], None],
    ) -> None:
        self._staging = context.staging
        self._groups = groups
        self._keep, self._let_go = keep, let_go
        self._puts = Puts(context, source_free=self._source_free, put_over=self._put_over)
        self._tasks: anyio.abc.TaskGroup | None = None
        self._ticket = 0
        self._by_ticket: dict[int, _Passing] = {}
        self._num_kept: Counter[str] = Counter()  # by receiver: pieces that lie in slots, of any ticket
        self._early: dict[int, list[tuple[str, Credit]]] = {}  # credits that have overtaken their grant
        self._unwanted: dict[int, set[str]] = {}  # the same of those that do not wait for it any more

    async def run(self) -> None:
        """Pass on what is credited until cancelled."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            tasks.start_soon(self._puts.run)
        raise InternalError("a relay has ended by itself, and keeps slots; please report it")

    @property
    def awaited_by(self) -> set[str]:
        """Those that have given credits which are not served yet."""
        own = self._by_ticket.get(self._ticket)
        return {duty[0] for duty in (*own.credits, *own.flying)} if own else set()

    @property
    def writing_to(self) -> set[str]:
        """Those to which something is being written."""
        own = self._by_ticket.get(self._ticket)
        return {duty[0] for duty in own.flying} if own else set()

    @property
    def kept_for(self) -> set[str]:
        """Those for which pieces lie in slots."""
        return set(self._num_kept)

    def serve(self, ticket: int, receivers: Mapping[int, Iterable[str]]) -> None:
        """From now on pass on what arrives of `ticket`, each group to these; nothing of earlier ones."""
        self.end()
        self._ticket = ticket
        gone = self._puts.gone.union(self._unwanted.get(ticket, ()))
        self._unwanted = {later: own for later, own in self._unwanted.items() if later > ticket}
        duties = {group: set(own) - gone for group, own in receivers.items()}
        passing = self._by_ticket[ticket] = _Passing(duties)
        passing.source = self._staging.open_source(functools.partial(self._read, passing))
        self._puts.announce(ticket, passing.source, lambda *duty: passing.pieces[duty])
        pieces: dict[str, list[tuple[int, int]]] = {}
        for group, own in duties.items():
            keys = [(group, piece) for piece in range(len(self._groups[group].pieces))]
            for receiver in own:
                pieces.setdefault(receiver, []).extend(keys)
        self._puts.serve(ticket, pieces)
        for early in sorted(early for early in self._early if early <= ticket):
            for receiver, credit in self._early.pop(early):
                self.credit(receiver, credit)

    def credit(self, receiver: str, credit: Credit) -> None:
        """A receiver takes a piece; that may have to arrive first. What is over is answered by a stop."""
        if credit.ticket > self._ticket:
            self._early.setdefault(credit.ticket, []).append((receiver, credit))
            return
        passing = self._by_ticket.get(credit.ticket)
        duty = (receiver, credit.group, credit.piece)
        if passing is None or receiver not in passing.receivers.get(credit.group, ()):
            self._puts.credit(receiver, credit)  # answers that it has stopped
        elif duty in passing.slots:
            self._start(passing, duty, credit)
        else:
            passing.credits[duty] = credit

    def verified(self, ticket: int, group: int, piece: int, slot: int, kept: memoryview, total: int) -> None:
        """These bytes are right: pass them on to whom they are owed."""
        passing = self._by_ticket.get(ticket)
        if passing is None or passing.source is None:
            return
        for receiver in sorted(passing.receivers.get(group, ())):
            duty = (receiver, group, piece)
            if duty in passing.pieces:
                continue  # a second arrival
            own = msgspec.structs.replace(self._groups[group].pieces[piece], transfers=())
            passing.pieces[duty], passing.duty_of[id(own)] = (own, total), duty
            passing.source.add(own, kept)
            self._keep(slot)
            passing.slots[duty] = slot
            self._num_kept[receiver] += 1
            if (credit := passing.credits.pop(duty, None)) is not None:
                self._start(passing, duty, credit)

    def drop(self, receiver: str, ticket: int = 0) -> None:
        """Pass nothing of a ticket, or of the current one, on to it, and tell it when that has stopped."""
        ticket = ticket or self._ticket
        if ticket > self._ticket:
            self._unwanted.setdefault(ticket, set()).add(receiver)
            self._puts.tell_stopped(receiver, ticket)
        elif (passing := self._by_ticket.get(ticket)) is not None:
            _forget(passing, receiver)
            self._puts.abort(ticket, [receiver])
            self._release(ticket, passing, receiver)

    def lose(self, receiver: str) -> None:
        """It is gone."""
        for passing in self._by_ticket.values():
            _forget(passing, receiver)
        self._puts.lose_receiver(receiver)
        for ticket, passing in list(self._by_ticket.items()):
            self._release(ticket, passing, receiver)

    def end(self) -> None:
        """Pass nothing more of this ticket on to anybody, and tell them when that has stopped."""
        passing = self._by_ticket.get(self._ticket)
        if passing is None or passing.source is None:
            return
        passing.source = None
        receivers = {receiver for own in passing.receivers.values() for receiver in own}
        for receiver in receivers:
            _forget(passing, receiver)
        self._puts.withdraw(self._ticket)
        for receiver in {duty[0] for duty in passing.slots}:
            self._release(self._ticket, passing, receiver)
        self._clear(self._ticket, passing)

    def _start(self, passing: _Passing, duty: Duty, credit: Credit) -> None:
        if duty[0] in self._puts.gone:
            return
        passing.flying.add(duty)
        self._puts.credit(duty[0], credit)

    def _release(self, ticket: int, passing: _Passing, receiver: str) -> None:
        """Keep nothing for it but what is being written to it: that ends by itself."""
        busy = passing.reading | passing.flying
        for duty in [duty for duty in passing.slots if duty[0] == receiver and duty not in busy]:
            self._keep_no_more(passing, duty)
        self._clear(ticket, passing)

    def _keep_no_more(self, passing: _Passing, duty: Duty) -> None:
        self._num_kept[duty[0]] -= 1
        if not self._num_kept[duty[0]]:
            del self._num_kept[duty[0]]
        self._let_go(passing.slots.pop(duty))

    def _source_free(self, ticket: int) -> None:
        """Nobody waits for that: slots are kept for pieces, not for tickets."""

    def _put_over(self, receiver: str, credit: Credit) -> None:
        passing, duty = self._by_ticket[credit.ticket], (receiver, credit.group, credit.piece)
        passing.flying.discard(duty)
        if duty not in passing.reading and duty in passing.slots:  # it was cut before it was copied
            self._keep_no_more(passing, duty)
        self._clear(credit.ticket, passing)

    def _read(self, passing: _Passing, piece: Piece, copied: Event) -> None:
        assert self._tasks is not None
        duty = passing.duty_of[id(piece)]
        passing.reading.add(duty)
        self._tasks.start_soon(self._let_go_after, passing, duty, copied)

    async def _let_go_after(self, passing: _Passing, duty: Duty, copied: Event) -> None:
        await copied.wait()
        passing.reading.discard(duty)
        self._keep_no_more(passing, duty)

    def _clear(self, ticket: int, passing: _Passing) -> None:
        if passing.source is None and passing.is_over:
            self._by_ticket.pop(ticket, None)


def _forget(passing: _Passing, receiver: str) -> None:
    for own in passing.receivers.values():
        own.discard(receiver)
    for duty in [duty for duty in passing.credits if duty[0] == receiver]:
        del passing.credits[duty]
