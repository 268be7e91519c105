"""Relay: what a rollout passes on: each piece once it has arrived, to those that gave a credit for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from wbridge.flow.actions import StartPut
from wbridge.flow.outgoing import Piece
from wbridge.sim.routing import Duties
from wbridge.sim.writer import Writer


class Relay:
    """A piece stays in its slot until it has been read for each of those who get it from here."""

    def __init__(self, writer: Writer, names: Mapping[int, str], num_pieces: Sequence[int]) -> None:
        """`names` of those to whom something may be passed on; `num_pieces` of each own group."""
        self._writer, self._names, self._num_pieces = writer, names, num_pieces
        self._keep: Callable[[int], None] | None = None
        self._let_go: Callable[[int], None] | None = None
        self._duties: Duties = {}
        self._credits: set[tuple[str, Piece]] = set()  # for what has not arrived here yet
        self._slots: dict[tuple[str, Piece], int] = {}
        self._ticket = 0
        writer.was_read = self._was_read

    def start(self, keep: Callable[[int], None], let_go: Callable[[int], None]) -> None:
        """`keep` and `let_go` are called with a slot, as often as each other."""
        self._keep, self._let_go = keep, let_go

    def serve(self, ticket: int, duties: Duties) -> None:
        """Pass each group on to these; credits that have come before are taken into account."""
        self._ticket, self._duties = ticket, duties
        pieces: dict[int, list[Piece]] = {}
        for group, own in duties.items():
            for k, number in own:
                pieces.setdefault(k, []).extend((number, p) for p in range(self._num_pieces[group]))
        self._writer.announced(ticket)
        self._writer.serve(ticket, pieces)

    def credit(self, receiver: str, ticket: int, piece: Piece) -> None:
        if (receiver, piece) in self._slots:
            self._writer.credit(receiver, ticket, piece)
        else:
            self._credits.add((receiver, piece))

    def verified(self, piece: Piece, slot: int) -> None:
        """A piece is there, and in this slot."""
        assert self._keep is not None, "started"
        for k, number in self._duties.get(piece[0], ()):
            duty = self._names[k], (number, piece[1])
            self._keep(slot)
            self._slots[duty] = slot
            if duty in self._credits:
                self._credits.remove(duty)
                self._writer.credit(duty[0], self._ticket, duty[1])

    def _was_read(self, put: StartPut) -> None:
        assert self._let_go is not None, "started"
        self._let_go(self._slots.pop((put.receiver, (put.group, put.piece))))
