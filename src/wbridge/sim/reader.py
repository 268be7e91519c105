"""Reader: the receiving end of a rollout: the real `ReceiverRing`, and scatters that take their time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol

from wbridge.errors import InternalError
from wbridge.flow.actions import GiveCredit, GroupReady, RingAction, ToLeader
from wbridge.flow.messages import Arrived, Landed, Vacant
from wbridge.flow.ring import Incoming, ReceiverRing
from wbridge.sim.world import World

Give = Callable[[GiveCredit], None]
"""Called with each credit that is to reach its writer."""


class Relay(Protocol):
    """What passes on the pieces of a rollout."""

    def start(self, keep: Callable[[int], None], let_go: Callable[[int], None]) -> None: ...
    def verified(self, piece: tuple[int, int], slot: int) -> None: ...


class Reader:
    """Gives credits, and once it is told to apply, writes what has landed into the parameters, by group."""

    def __init__(
        self,
        world: World,
        *,
        index: int,
        name: str,
        engine: str,
        groups: Sequence[Sequence[tuple[str, int]]],
        num_slots: int,
        takes_parked: bool,
    ) -> None:
        """`groups`: trainer and bytes of each piece. `takes_parked`: slots fill once the engine is held."""
        self._world, self._index, self.name, self.engine = world, index, name, engine
        self._trainers = [tuple(writer for writer, _ in group) for group in groups]
        self._incoming: tuple[Incoming, ...] = ()
        self.relay: Relay | None = None
        self.sizes: list[list[int]] = [[nbytes for _, nbytes in group] for group in groups]
        self._before_hold = 0 if takes_parked else min(len(groups), num_slots)
        self._ring = ReceiverRing(num_slots, parked=takes_parked)
        self._give: Give | None = None
        self._to_leader: Callable[[Landed | Vacant], None] | None = None
        self._ready: dict[int, tuple[int, int]] = {}  # by group: ticket and slot
        self._next = 0  # the group to be scattered next
        self._num_scattered = 0
        self._applied: Callable[[], None] | None = None
        self.arrived_nbytes = 0
        self.num_arrived = 0
        """Pieces; each counts whenever it arrives."""
        self.landed_s: float | None = None

    def start(self, give: Give, to_leader: Callable[[Landed | Vacant], None]) -> None:
        self._give, self._to_leader = give, to_leader
        if self.relay is not None:
            self.relay.start(self._ring.keep, lambda slot: self._perform(self._ring.checked(slot)))
        self._perform(self._ring.start())

    @property
    def num_pieces(self) -> list[int]:
        """Of each group."""
        return [len(group) for group in self.sizes]

    @property
    def needed_nbytes(self) -> int:
        return sum(sum(group) for group in self.sizes)

    def serve(self, ticket: int, sources: Mapping[int, str]) -> None:
        """Take a grant; `sources`: by group, who passes it on, if not the trainers."""
        self._incoming = tuple(
            Incoming((sources[group],) * len(trainers) if group in sources else trainers)
            for group, trainers in enumerate(self._trainers)
        )
        self._perform(self._ring.grant(ticket, self._incoming, before_hold=self._before_hold))

    def arrived(self, message: Arrived) -> None:
        self.num_arrived += 1
        self.arrived_nbytes += self.sizes[message.group][message.piece]
        name = self._incoming[message.group].writers[message.piece]
        slot = None if self.relay is None else self._ring.checking(name, message)
        if slot is not None and self.relay is not None:
            self.relay.verified((message.group, message.piece), slot)
        self._perform(self._ring.arrived(name, message))
        if slot is not None:
            self._perform(self._ring.checked(slot))

    def apply(self, then: Callable[[], None]) -> None:
        """Write all groups into the parameters as they land."""
        self._applied = then
        self._scatter()

    def _scatter(self) -> None:
        while self._applied is not None and self._next in self._ready:
            group, self._next = self._next, self._next + 1
            ticket, slot = self._ready.pop(group)
            if not self._ring.draining(slot, ticket):
                raise InternalError(f"{self.name}: slot {slot} is not ready; please report it")
            self._world.copy(self._index, sum(self.sizes[group]), partial(self._scattered, slot))
        if self._applied is not None and self._num_scattered == len(self.sizes):
            applied, self._applied = self._applied, None
            applied()

    def _scattered(self, slot: int) -> None:
        self._num_scattered += 1
        self._perform(self._ring.drained(slot))
        self._scatter()

    def _perform(self, actions: Iterable[RingAction]) -> None:
        assert self._give is not None and self._to_leader is not None, "started"
        for action in actions:
            match action:
                case GiveCredit():
                    self._give(action)
                case GroupReady(ticket, group, slot):
                    self._ready[group] = ticket, slot
                    self._scatter()
                case ToLeader(message):
                    if isinstance(message, Landed) and message.whole:
                        self.landed_s = self._world.timeline.now
                    self._to_leader(message)  # type: ignore[arg-type]  # a ring says nothing else
                case _:
                    raise InternalError(f"{action}: nothing is aborted in a simulation; please report it")
