"""Writer: the sending end of a worker: the real `Outgoing` machine, and puts over the simulated network."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from wbridge.errors import InternalError
from wbridge.flow.actions import FreeSource, OutgoingAction, StartPut
from wbridge.flow.messages import Arrived
from wbridge.flow.outgoing import Outgoing, Piece
from wbridge.sim.reader import Reader
from wbridge.sim.routing import Routing
from wbridge.sim.world import World

Share = Mapping[int, Iterable[Piece]]
"""By receiver."""


class _Mail:
    """Puts to one receiver: a few at once between hosts, since each is gathered into a slot of its own. The
    bytes of one go over the connection after those of the other."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.waiting: deque[Callable[[], None]] = deque()
        self.gathered: deque[Callable[[], None]] = deque()
        """The first of these moves."""


class Writer:
    """Writes what it has to receivers that are granted and have given credits."""

    def __init__(
        self,
        world: World,
        index: int,
        pieces: Mapping[int, Mapping[Piece, int]],
        readers: Mapping[int, Reader],
    ) -> None:
        """`pieces`: by receiver, the bytes of what this worker may write to it."""
        self._world, self._index, self._readers = world, index, readers
        self._pieces = {readers[k].name: own for k, own in pieces.items()}
        self._receivers = {readers[k].name: k for k in pieces}
        self._mail = {k: _Mail(self._slots(k)) for k in pieces}
        self._outgoing = Outgoing()
        self.was_read: Callable[[StartPut], None] | None = None
        """Called with each put when its source is not read any more."""
        self.num_puts = 0
        self.free_s: float | None = None
        """When its source was free again."""

    def _slots(self, receiver: int) -> int:
        local = self._world.fabric.is_local(self._index, receiver)
        return len(self._pieces[self._readers[receiver].name]) if local else self._world.config.local_slots

    def is_free(self) -> bool:
        """Nobody reads the source any more."""
        return self.free_s is not None

    def announced(self, ticket: int) -> None:
        self._perform(self._outgoing.announced(ticket))

    def serve(self, ticket: int, pieces: Share, spare: Share | None = None) -> None:
        """Write these as they are credited; the spare ones too, if they are."""
        due, others = (
            {self._readers[k].name: own for k, own in each.items()} for each in (pieces, spare or {})
        )
        self._perform(self._outgoing.serve(ticket, due, others))

    def serve_engines(self, ticket: int, engines: Iterable[str], routing: Routing) -> None:
        """Write all that the receivers of these do not get from each other."""
        granted = frozenset(engines)
        due: dict[int, Iterable[Piece]] = {}
        spare: dict[int, Iterable[Piece]] = {}
        for name, own in self._pieces.items():
            k = self._receivers[name]
            if self._readers[k].engine not in granted:
                continue
            sources = routing.sources(k, granted)
            due[k] = [piece for piece in own if piece[0] not in sources]
            spare[k] = [piece for piece in own if piece[0] in sources]
        self.serve(ticket, due, spare)

    def credit(self, receiver: str, ticket: int, piece: Piece) -> None:
        self._perform(self._outgoing.credit(receiver, ticket, *piece))

    def retired(self, ticket: int) -> None:
        self._perform(self._outgoing.retired(ticket))

    def _perform(self, actions: Iterable[OutgoingAction]) -> None:
        for action in actions:
            match action:
                case StartPut():
                    self._begin(action)
                case FreeSource():
                    self.free_s = self._world.timeline.now
                case _:
                    raise InternalError(f"{action}: nothing is aborted in a simulation; please report it")

    def _begin(self, put: StartPut) -> None:
        mail = self._mail[self._receivers[put.receiver]]
        if mail.free:
            mail.free -= 1
            self._gather(put)
        else:
            mail.waiting.append(partial(self._gather, put))

    def _gather(self, put: StartPut) -> None:
        nbytes = self._pieces[put.receiver][put.group, put.piece]
        copies = self._world.fabric.num_copies(self._receivers[put.receiver])
        self.num_puts += copies
        copied = partial(self._put, put, nbytes, copies)
        self._world.copy(self._index, nbytes * copies, copied, passes_on=self.was_read is not None)

    def _put(self, put: StartPut, nbytes: int, copies: int) -> None:
        receiver = self._receivers[put.receiver]
        hops = self._world.fabric.hops(self._index, receiver)
        moved = partial(self._moved, put, receiver)
        move = partial(self._world.network.send, hops, nbytes, moved)
        if not self._world.fabric.is_local(self._index, receiver):
            if self.was_read is not None:
                self.was_read(put)  # it is in a slot of ours, for this receiver
            move = partial(self._in_turn, self._mail[receiver], move)
        self._world.handle(self._index, move, times=copies)

    @staticmethod
    def _in_turn(mail: _Mail, move: Callable[[], None]) -> None:
        mail.gathered.append(move)
        if len(mail.gathered) == 1:
            move()

    def _moved(self, put: StartPut, receiver: int) -> None:
        """The last byte is through: the notification follows, and the acknowledgement comes back."""
        if not self._world.fabric.is_local(self._index, receiver):
            gathered = self._mail[receiver].gathered
            gathered.popleft()
            if gathered:
                gathered[0]()
        elif self.was_read is not None:
            self.was_read(put)
        latency_s = self._world.fabric.latency_s(self._index, receiver)
        arrive = partial(self._readers[receiver].arrived, Arrived(put.ticket, put.group, put.piece))
        self._world.timeline.after(latency_s, partial(self._world.handle, receiver, arrive))
        self._world.timeline.after(2 * latency_s, partial(self._ended, put))

    def _ended(self, put: StartPut) -> None:
        mail = self._mail[self._receivers[put.receiver]]
        mail.free += 1
        if mail.waiting:
            mail.free -= 1
            mail.waiting.popleft()()
        self._perform(self._outgoing.put_ended(put.receiver, put.ticket, put.group, put.piece))
