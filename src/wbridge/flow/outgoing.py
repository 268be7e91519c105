"""Outgoing: which puts of a writer may start, when it has stopped, and when a source is free.

One object serves one worker for one epoch, over all tickets. Events in, actions out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from wbridge.flow.actions import CancelPut, Flush, FreeSource, OutgoingAction, SendStopped, StartPut

Piece = tuple[int, int]
"""(group, piece) of one receiver."""

NOTHING: Mapping[str, Iterable[Piece]] = {}


class _Share:
    """What one receiver still gets of one ticket."""

    def __init__(self, pieces: Iterable[Piece], spare: Iterable[Piece]) -> None:
        self.due = set(pieces)  # granted, not started
        self.spare = set(spare)  # a relay brings them, unless the receiver gives us credits all the same
        self.flying: set[Piece] = set()
        self.flushing: set[int] = set()  # groups (-1: all) whose flush is under way
        self.owed: set[int] = set()  # groups (-1: all) to be stopped once nothing flies
        self.stopped = False  # nothing more will start


class _Source:
    """One ticket's source on this worker."""

    def __init__(self) -> None:
        self.shares: dict[str, _Share] = {}
        self.early: dict[str, set[Piece]] = {}  # credits that came before the grant, if one follows
        self.retired = False

    @property
    def busy(self) -> bool:
        return any(share.flying or share.owed or share.flushing for share in self.shares.values())


class Outgoing:
    """The writer's side of credits. A put starts when its receiver is granted and has given the credit."""

    def __init__(self) -> None:
        self._sources: dict[int, _Source] = {}
        self._announced = 0  # every ticket up to here that is not in `_sources` is over

    def announced(self, ticket: int) -> list[OutgoingAction]:
        """A ticket exists; its source is ready. Tickets are announced in order."""
        self._announced = max(self._announced, ticket)
        self._sources.setdefault(ticket, _Source())
        return []

    def serve(
        self,
        ticket: int,
        pieces: Mapping[str, Iterable[Piece]],
        spare: Mapping[str, Iterable[Piece]] = NOTHING,
    ) -> list[OutgoingAction]:
        """A serving set: what we write to each receiver in it. A ticket may have several.

        `spare`: what we write only if the receiver cannot get it from a relay.
        """
        source = self._sources.get(ticket)
        if source is None:
            return []  # aborted and over
        out: list[OutgoingAction] = []
        for receiver in dict.fromkeys((*pieces, *spare)):
            if receiver not in source.shares:
                source.shares[receiver] = _Share(pieces.get(receiver, ()), spare.get(receiver, ()))
                for piece in sorted(source.early.pop(receiver, ())):
                    self._start(ticket, receiver, piece, out)
        return out

    def credit(self, receiver: str, ticket: int, group: int, piece: int) -> list[OutgoingAction]:
        """The receiver lets us write this piece, once. It may come before the grant; a void one is dropped,
        and one that comes when the ticket is over is answered: we have stopped."""
        if ticket > self._announced:
            self._sources.setdefault(ticket, _Source())
        source = self._sources.get(ticket)
        if source is None:
            return [SendStopped(receiver, ticket, group)]
        if receiver not in source.shares:
            if source.retired:
                return [SendStopped(receiver, ticket, group)]
            source.early.setdefault(receiver, set()).add((group, piece))
            return []
        out: list[OutgoingAction] = []
        self._start(ticket, receiver, (group, piece), out)
        return out

    def put_ended(self, receiver: str, ticket: int, group: int, piece: int) -> list[OutgoingAction]:
        """The put is over, well or not: it touches neither end any more, or a flush will see to it."""
        share = self._share(ticket, receiver)
        if share is None:
            return []
        share.flying.discard((group, piece))
        return self._go_on(ticket, receiver)

    def flushed(self, receiver: str, ticket: int, group: int) -> list[OutgoingAction]:
        """The flush is over: we have stopped, and say so."""
        share = self._share(ticket, receiver)
        if share is None or group not in share.flushing:
            return []
        share.flushing.discard(group)
        return [SendStopped(receiver, ticket, group), *self._go_on(ticket, receiver)]

    def give_up(self, receiver: str, ticket: int, group: int, piece: int) -> list[OutgoingAction]:
        """Another writer brings this piece: stop for the group, and say so, also if we wrote nothing."""
        share = self._share(ticket, receiver)
        if share is None or share.stopped:
            return []
        share.due.discard((group, piece))
        share.owed.add(group)
        out = [CancelPut(receiver, ticket, *put) for put in sorted(share.flying) if put == (group, piece)]
        return [*out, *self._go_on(ticket, receiver)]

    def take_over(self, receiver: str, ticket: int, group: int, piece: int) -> list[OutgoingAction]:
        """We bring this piece in place of another writer."""
        source = self._sources.get(ticket)
        share = self._share(ticket, receiver)
        if source is None or share is None or share.stopped:
            return []
        share.due.add((group, piece))
        out: list[OutgoingAction] = []
        if (group, piece) in source.early.get(receiver, ()):
            source.early[receiver].discard((group, piece))
            self._start(ticket, receiver, (group, piece), out)
        return out

    def aborted(self, ticket: int, receivers: Iterable[str]) -> list[OutgoingAction]:
        """The grants of these receivers are void: stop, flush, and say so, also if we wrote nothing."""
        source = self._sources.get(ticket)
        out: list[OutgoingAction] = []
        for receiver in receivers if source is not None else ():
            share = self._share(ticket, receiver)
            if share is None or share.stopped:
                continue
            share.stopped = True
            share.due.clear()
            share.spare.clear()
            share.owed = {-1}
            out += [CancelPut(receiver, ticket, *put) for put in sorted(share.flying)]
            out += self._go_on(ticket, receiver)
        return out

    def retired(self, ticket: int) -> list[OutgoingAction]:
        """No receiver needs the source any more. It is free once our own puts are over.

        A receiver that got a piece of ours from elsewhere, or gave us credits and was not granted the ticket,
        is told that we do not write it any more.
        """
        source = self._sources.get(ticket)
        if source is None:
            return []
        source.retired = True
        for share in source.shares.values():
            share.spare.clear()
        unwritten = [receiver for receiver, share in source.shares.items() if share.due]
        unserved = [SendStopped(r, ticket, -1) for r in sorted(source.early.keys() - source.shares.keys())]
        return [*unserved, *self.aborted(ticket, unwritten), *self._free_if_over(ticket)]

    def receiver_lost(self, receiver: str) -> list[OutgoingAction]:
        """Nobody is there to be told; what flies ends by itself."""
        out: list[OutgoingAction] = []
        for ticket, source in list(self._sources.items()):
            source.early.pop(receiver, None)
            share = source.shares.get(receiver)
            if share is not None:
                share.stopped = True
                share.due.clear()
                share.spare.clear()
                share.owed.clear()
                share.flushing.clear()
            out += self._free_if_over(ticket)
        return out

    # What follows from the state -----------------------------------------------------------------------

    def _share(self, ticket: int, receiver: str) -> _Share | None:
        source = self._sources.get(ticket)
        return None if source is None else source.shares.get(receiver)

    def _start(self, ticket: int, receiver: str, piece: Piece, out: list[OutgoingAction]) -> None:
        source = self._sources[ticket]
        share = source.shares[receiver]
        if piece in share.due or piece in share.spare:
            share.due.discard(piece)
            share.spare.discard(piece)
            share.flying.add(piece)
            out.append(StartPut(receiver, ticket, *piece))
        elif share.stopped or piece in share.flying:
            return
        elif source.retired:  # it came too late: what it is for has come from a relay
            share.owed.add(piece[0])
            out += self._go_on(ticket, receiver)
        else:
            source.early.setdefault(receiver, set()).add(piece)  # a reassignment may follow

    def _go_on(self, ticket: int, receiver: str) -> list[OutgoingAction]:
        share = self._sources[ticket].shares[receiver]
        out: list[OutgoingAction] = []
        for group in sorted(share.owed):
            if not any(group in (-1, flying) for flying, _ in share.flying):
                share.owed.discard(group)
                share.flushing.add(group)
                out.append(Flush(receiver, ticket, group))
        return [*out, *self._free_if_over(ticket)]

    def _free_if_over(self, ticket: int) -> list[OutgoingAction]:
        source = self._sources.get(ticket)
        if source is None or not source.retired or source.busy:
            return []
        del self._sources[ticket]
        return [FreeSource(ticket)]
