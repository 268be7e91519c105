"""Relay: passes verified pieces of a ticket on to other members of its exchanges."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping

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

Key = tuple[int, int]
"""A group as its receiver counts, and a piece of it."""

Receivers = Mapping[str, int]
"""To whom a group is passed on, and which of their groups it is."""


class _Duties:
    """What is owed to one receiver of a ticket."""

    def __init__(self) -> None:
        self.groups: set[int] = set()
        self.credits: dict[Key, Credit] = {}  # for what has not arrived here yet
        self.pieces: dict[Key, tuple[Piece, int]] = {}  # what has, and its checksum
        self.slots: dict[Key, int] = {}  # where it is kept
        self.reading: set[Key] = set()
        self.flying: set[Key] = set()

    def forget(self) -> None:
        self.groups.clear()
        self.credits.clear()


class _Passing:
    """What is passed on of one ticket."""

    def __init__(self, ticket: int, receivers: Mapping[int, Receivers]) -> None:
        self.ticket = ticket
        self.receivers = receivers  # by group, as this worker counts
        self.source: KeptPieces | None = None
        self.duties: dict[str, _Duties] = {}
        self.duty_of: dict[int, tuple[str, Key]] = {}  # by the identity of the piece
        self.num_busy = 0  # pieces in slots, and those that fly
        for own in receivers.values():
            for receiver, group in own.items():
                self.duties.setdefault(receiver, _Duties()).groups.add(group)

    def piece(self, receiver: str, group: int, piece: int) -> tuple[Piece, int]:
        return self.duties[receiver].pieces[group, piece]


class Relay:
    """The duties of one rollout worker, in the ticket that it takes now.

    A piece is kept in its slot for each receiver until it has been copied out, or that is dropped: `keep` and
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
        return {receiver for receiver, own in self._current.items() if own.credits or own.flying}

    @property
    def writing_to(self) -> set[str]:
        """Those to which something is being written."""
        return {receiver for receiver, own in self._current.items() if own.flying}

    @property
    def kept_for(self) -> set[str]:
        """Those for which pieces lie in slots."""
        return set(self._num_kept)

    @property
    def _current(self) -> Mapping[str, _Duties]:
        passing = self._by_ticket.get(self._ticket)
        return passing.duties if passing else {}

    def serve(self, ticket: int, receivers: Mapping[int, Receivers]) -> None:
        """From now on pass on what arrives of `ticket`, each group to these; nothing of earlier ones."""
        self.end()
        self._ticket = ticket
        gone = self._puts.gone.union(self._unwanted.get(ticket, ()))
        self._unwanted = {later: own for later, own in self._unwanted.items() if later > ticket}
        duties = {g: {name: k for name, k in own.items() if name not in gone} for g, own in receivers.items()}
        passing = self._by_ticket[ticket] = _Passing(ticket, duties)
        passing.source = self._staging.open_source(functools.partial(self._read, passing))
        self._puts.announce(ticket, passing.source, passing.piece)
        pieces: dict[str, list[Key]] = {}
        for group, own in duties.items():
            for receiver, number in own.items():
                keys = [(number, piece) for piece in range(len(self._groups[group].pieces))]
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
        duties = passing.duties.get(receiver) if passing else None
        key = (credit.group, credit.piece)
        if passing is None or duties is None or credit.group not in duties.groups:
            self._puts.credit(receiver, credit)  # answers that it has stopped
        elif key in duties.slots:
            self._start(passing, receiver, credit)
        else:
            duties.credits[key] = credit

    def verified(
        self, ticket: int, group: int, piece: int, slot: int, kept: memoryview, total: int
    ) -> set[str]:
        """These bytes are right: pass them on to whom they are owed.

        Returns those for whom nothing was kept before, and this is now.
        """
        passing = self._by_ticket.get(ticket)
        first: set[str] = set()
        if passing is None or passing.source is None:
            return first
        for receiver, number in passing.receivers.get(group, {}).items():
            duties, key = passing.duties[receiver], (number, piece)
            if number not in duties.groups or key in duties.pieces:
                continue  # it is dropped, or this is a second arrival
            own = msgspec.structs.replace(self._groups[group].pieces[piece], transfers=())
            duties.pieces[key], passing.duty_of[id(own)] = (own, total), (receiver, key)
            passing.source.add(own, kept)
            self._keep(slot)
            duties.slots[key] = slot
            passing.num_busy += 1
            if not self._num_kept[receiver]:
                first.add(receiver)
            self._num_kept[receiver] += 1
            if (credit := duties.credits.pop(key, None)) is not None:
                self._start(passing, receiver, credit)
        return first

    def drop(self, receiver: str, ticket: int = 0) -> None:
        """Pass nothing of a ticket, or of the current one, on to it, and tell it when that has stopped."""
        ticket = ticket or self._ticket
        if ticket > self._ticket:
            self._unwanted.setdefault(ticket, set()).add(receiver)
            self._puts.tell_stopped(receiver, ticket)
        elif (passing := self._by_ticket.get(ticket)) is not None and receiver in passing.duties:
            passing.duties[receiver].forget()
            self._puts.abort(ticket, [receiver])
            self._release(passing, receiver)

    def lose(self, receiver: str) -> None:
        """It is gone."""
        for passing in self._by_ticket.values():
            if receiver in passing.duties:
                passing.duties[receiver].forget()
        self._puts.lose_receiver(receiver)
        for passing in list(self._by_ticket.values()):
            self._release(passing, receiver)

    def end(self) -> None:
        """Pass nothing more of this ticket on to anybody, and tell them when that has stopped."""
        passing = self._by_ticket.get(self._ticket)
        if passing is None or passing.source is None:
            return
        passing.source = None
        for duties in passing.duties.values():
            duties.forget()
        self._puts.withdraw(self._ticket)
        for receiver in passing.duties:
            self._release(passing, receiver)
        self._clear(passing)

    def _start(self, passing: _Passing, receiver: str, credit: Credit) -> None:
        if receiver in self._puts.gone:
            return
        passing.duties[receiver].flying.add((credit.group, credit.piece))
        passing.num_busy += 1
        self._puts.credit(receiver, credit)

    def _release(self, passing: _Passing, receiver: str) -> None:
        """Keep nothing for it but what is being written to it: that ends by itself."""
        if (duties := passing.duties.get(receiver)) is not None:
            for key in duties.slots.keys() - duties.reading - duties.flying:
                self._keep_no_more(passing, receiver, key)
        self._clear(passing)

    def _keep_no_more(self, passing: _Passing, receiver: str, key: Key) -> None:
        self._num_kept[receiver] -= 1
        if not self._num_kept[receiver]:
            del self._num_kept[receiver]
        passing.num_busy -= 1
        self._let_go(passing.duties[receiver].slots.pop(key))

    def _source_free(self, ticket: int) -> None:
        """Nobody waits for that: slots are kept for pieces, not for tickets."""

    def _put_over(self, receiver: str, credit: Credit) -> None:
        passing, key = self._by_ticket[credit.ticket], (credit.group, credit.piece)
        duties = passing.duties[receiver]
        if key in duties.flying:
            duties.flying.remove(key)
            passing.num_busy -= 1
        if key not in duties.reading and key in duties.slots:  # it was cut before it was copied
            self._keep_no_more(passing, receiver, key)
        self._clear(passing)

    def _read(self, passing: _Passing, piece: Piece, copied: Event) -> None:
        assert self._tasks is not None
        receiver, key = passing.duty_of[id(piece)]
        passing.duties[receiver].reading.add(key)
        self._tasks.start_soon(self._let_go_after, passing, receiver, key, copied)

    async def _let_go_after(self, passing: _Passing, receiver: str, key: Key, copied: Event) -> None:
        await copied.wait()
        passing.duties[receiver].reading.discard(key)
        self._keep_no_more(passing, receiver, key)
        self._clear(passing)

    def _clear(self, passing: _Passing) -> None:
        if passing.source is None and not passing.num_busy:
            self._by_ticket.pop(passing.ticket, None)
