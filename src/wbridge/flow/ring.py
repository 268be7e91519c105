"""ReceiverRing: who may write which slot of one receiver, and when a slot is free again.

A slot is FREE, FILLING (credits are out), READY (the group is whole), DRAINING (being applied), or
QUARANTINED (some credited writer may still write), and only a FREE one is credited. Events in, actions out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from wbridge.flow.actions import GiveCredit, GroupReady, ReplaceSlot, RingAction, TakeBack, ToLeader
from wbridge.flow.barrier import Barrier
from wbridge.flow.messages import Arrived, Landed, Stopped, Vacant

State = Literal["free", "filling", "ready", "draining", "quarantined", "replacing"]


class Incoming(msgspec.Struct, frozen=True):
    """One group of a ticket: the writer of each piece, and the stage whose slots it uses."""

    writers: tuple[str, ...]
    stage: int = 1


class _Slot:
    def __init__(self, index: int) -> None:
        self.index = index
        self.state: State = "free"
        self.ticket = 0
        self.group = -1
        self.barrier: Barrier[int] = Barrier(())
        self.num_readers = 0  # of what has arrived: checks, and relays
        self.may_write: set[tuple[str, int]] = set()  # (writer, piece) credited, neither written nor stopped
        self.is_shared = False  # of one piece there have been two


class _Grant:
    """The ticket that this ring is taking, or expects to take."""

    def __init__(self, ticket: int, groups: Sequence[Incoming], *, is_given: bool) -> None:
        self.ticket = ticket
        self.is_given = is_given
        self.before_hold = 0
        self.writers = [list(group.writers) for group in groups]
        self.queues: dict[int, list[int]] = {}  # stage -> groups not credited yet, in order
        for index, group in enumerate(groups):
            self.queues.setdefault(group.stage, []).append(index)
        self.num_in_stage = {stage: len(queue) for stage, queue in self.queues.items()}
        self.num_groups = self.num_undrained = len(groups)
        self.num_ready = 0


class ReceiverRing:
    """The slots of one receiver. Groups take the slots of their stage in order, round and round.

    `num_slots` gives the slots of each stage; slot numbers run through the stages in ascending order.
    `parked`: versions are taken only while the engine stands still, so the leader need not hear of vacancy.
    """

    def __init__(self, num_slots: Mapping[int, int] | int, *, parked: bool = False) -> None:
        stages = {1: num_slots} if isinstance(num_slots, int) else dict(num_slots)
        self._stage_slots: dict[int, range] = {}
        start = 0
        for stage, count in sorted(stages.items()):
            self._stage_slots[stage] = range(start, start + count)
            start += count
        self._slots = [_Slot(index) for index in range(start)]
        # A ring may have thousands of slots, so no event looks at all of them while bytes arrive.
        self._held: dict[int, dict[int, int]] = {}  # ticket -> group -> slot
        self._quarantined: set[int] = set()
        self._next = dict.fromkeys(self._stage_slots, 0)  # per stage: position of the next group
        self._parked = parked
        self._grant: _Grant | None = None
        self._num_ended = 0
        self._told_vacant = -1
        self._newest = 0
        self._stops: dict[int, set[tuple[str, int]]] = {}  # ticket -> (writer, group or -1), while it matters

    @property
    def states(self) -> tuple[State, ...]:
        return tuple(slot.state for slot in self._slots)

    def is_quarantined(self, slot: int) -> bool:
        return self._slots[slot].state == "quarantined"

    @property
    def wants_slots(self) -> bool:
        """Groups of the current ticket wait for a slot to become free."""
        return self._grant is not None and any(self._grant.queues.values())

    def start(self) -> list[RingAction]:
        """The ring's memory is there: tell the leader."""
        return [ToLeader(Vacant(0, parked=True))] if self._parked else self._go_on([])

    def expect(self, ticket: int, groups: Sequence[Incoming]) -> list[RingAction]:
        """Credit the first groups of the ticket that is likely to be granted next. Their writers wait for the
        grant; that of another ticket voids this."""
        if not self._is_vacant or not groups:
            return []
        self._grant = _Grant(ticket, groups, is_given=False)
        return self._go_on([])

    def grant(self, ticket: int, groups: Sequence[Incoming], *, before_hold: int = 0) -> list[RingAction]:
        """Take a grant: credit its first groups, if it was not expected. Tickets only go up; what is left of
        an earlier is void.

        `before_hold`: the leader hears when so many groups are there, or as many as fit, if not all do.
        """
        assert ticket > self._newest, f"ticket {ticket} granted after {self._newest}"
        out: list[RingAction] = []
        self._newest = ticket
        if self._grant is None or self._grant.is_given or self._grant.ticket != ticket:
            self._void(out)
            self._grant = _Grant(ticket, groups, is_given=True)
        grant = self._grant
        grant.is_given = True
        room = sum(min(n, len(self._stage_slots[s])) for s, n in grant.num_in_stage.items())
        grant.before_hold = min(before_hold, room)
        if grant.num_ready >= (grant.before_hold or grant.num_groups):  # they have come before it
            self._tell_landed(grant, out)
        if not groups:
            self._end_grant()
        return self._go_on(out)

    def arrived(self, writer: str, message: Arrived) -> list[RingAction]:
        """A piece is in its slot. A second, stale or foreign arrival changes nothing."""
        slot = self._find(message.ticket, message.group)
        if slot is None:
            return []
        slot.may_write.discard((writer, message.piece))
        out: list[RingAction] = []
        if slot.state == "filling" and slot.barrier.arrive(message.piece):
            self._ready_if_whole(slot, out)
        return self._go_on(out)

    def checking(self, writer: str, message: Arrived) -> int | None:
        """Return the slot whose piece is to be read before it counts as arrived; it is kept until `checked`.
        A second arrival too: it has changed what was read for the first.

        None: the arrival is stale, and the slot may be somebody else's by now, or is applied already.
        """
        slot = self._find(message.ticket, message.group)
        if slot is None or slot.state not in ("filling", "ready"):
            return None
        if message.piece not in slot.barrier.missing and (writer, message.piece) not in slot.may_write:
            return None
        slot.num_readers += 1
        return slot.index

    def keep(self, slot: int) -> None:
        """What has arrived in this slot is read once more, until `checked`; it is not used again before."""
        assert self._slots[slot].state == "filling", f"slot {slot} is {self._slots[slot].state}, not filling"
        self._slots[slot].num_readers += 1

    def checked(self, slot: int) -> list[RingAction]:
        """That read is over."""
        assert self._slots[slot].num_readers, f"nothing of slot {slot} is being read"
        self._slots[slot].num_readers -= 1
        return self._go_on([])

    def is_shared(self, slot: int) -> bool:
        """Whether some piece in it has had two writers, so that the one that came late, or was stopped in the
        middle, may have changed what had been found right of the other."""
        return self._slots[slot].is_shared

    def stopped(self, writer: str, message: Stopped) -> list[RingAction]:
        """The writer writes no more for the ticket, or for one group of it. It may overtake anything."""
        held = self._held.get(message.ticket, {})
        if message.ticket > self._newest or held or self._current == message.ticket:
            self._stops.setdefault(message.ticket, set()).add((writer, message.group))
        for group in held if message.group == -1 else held.keys() & {message.group}:
            self._clear(self._slots[held[group]], writer)
        return self._go_on([])

    def taken_back(self, slot: int, ticket: int, writer: str) -> list[RingAction]:
        """The transport proves that the writer will not touch this slot for this ticket any more."""
        if self._slots[slot].ticket == ticket:
            self._clear(self._slots[slot], writer)
        return self._go_on([])

    def reassign(self, ticket: int, group: int, piece: int, writer: str) -> list[RingAction]:
        """Another writer brings this piece; it keeps its slot, which waits for both to write or stop."""
        if self._grant is None or self._grant.ticket != ticket:
            return []
        self._grant.writers[group][piece] = writer
        slot = self._find(ticket, group)
        out: list[RingAction] = []
        if slot is not None and slot.state == "filling" and piece in slot.barrier.missing:
            slot.is_shared = True
            self._credit_piece(slot.index, piece, out)
        return out

    def abort(self, ticket: int) -> list[RingAction]:
        """Void this ticket, and it alone. Slots that may still be written are quarantined."""
        if self._grant is None or self._grant.ticket != ticket:
            return []
        out: list[RingAction] = []
        self._void(out)
        return self._go_on(out)

    def renew(self) -> list[RingAction]:
        """A new epoch: the grant is void, counts and stops start again, quarantined slots stay so.

        Their `TakeBack` is given anew, for ticket 0: nothing of the old epoch can free them but proof.
        """
        out: list[RingAction] = []
        self._void([])
        self._held.clear()
        for index, slot in enumerate(self._slots):
            slot.ticket, slot.group = 0, -1
            if slot.state == "quarantined" and slot.may_write:
                out.append(self._take_back(index))
        self._num_ended, self._told_vacant, self._newest = 0, -1, 0
        self._stops.clear()
        return self._go_on(out)

    def draining(self, slot: int, ticket: int) -> bool:
        """The group in this slot is about to be read. False: its ticket was aborted, leave it alone."""
        ready = self._slots[slot].state == "ready" and self._slots[slot].ticket == ticket
        if ready:
            self._slots[slot].state = "draining"
        return ready

    def drained(self, slot: int) -> list[RingAction]:
        """The transfer out of the slot has stopped (not: its waiter has left)."""
        drained = self._slots[slot]
        assert drained.state == "draining", f"slot {slot} is {drained.state}, not draining"
        out: list[RingAction] = []
        current = self._grant is not None and self._grant.ticket == drained.ticket
        self._vacate(slot, out)
        if current and self._grant is not None:
            self._grant.num_undrained -= 1
            if not self._grant.num_undrained:
                self._end_grant()
        return self._go_on(out)

    def abandon(self, slot: int, ticket: int) -> list[RingAction]:
        """`fence_timeout_s` has passed without proof: the slot gets other memory."""
        late = self._slots[slot]
        if late.state != "quarantined" or late.ticket != ticket:
            return []  # proof came in time
        self._quarantined.discard(slot)
        self._leave(late, "replacing")
        late.may_write.clear()
        return [ReplaceSlot(slot)]

    def replaced(self, slot: int) -> list[RingAction]:
        """The slot has new memory that nobody else can reach."""
        assert self._slots[slot].state == "replacing", f"slot {slot} is {self._slots[slot].state}"
        self._slots[slot].state = "free"
        return self._go_on([])

    # What follows from the state -----------------------------------------------------------------------

    @property
    def _is_vacant(self) -> bool:
        return self._grant is None and all(slot.state == "free" for slot in self._slots)

    @property
    def _current(self) -> int:
        return 0 if self._grant is None else self._grant.ticket

    def _find(self, ticket: int, group: int) -> _Slot | None:
        index = self._held.get(ticket, {}).get(group)
        return None if index is None else self._slots[index]

    def _leave(self, slot: _Slot, state: State) -> None:
        """It is no group's any more."""
        held = self._held.get(slot.ticket, {})
        held.pop(slot.group, None)
        if not held:
            self._held.pop(slot.ticket, None)
        slot.state, slot.ticket, slot.group = state, 0, -1

    def _go_on(self, out: list[RingAction]) -> list[RingAction]:
        """Free what may be freed, credit the same ticket's next groups, tell the leader of vacancy."""
        for slot in [self._slots[index] for index in self._quarantined]:
            if not slot.may_write and not slot.num_readers:
                self._quarantined.discard(slot.index)
                self._leave(slot, "free")
        if self._grant is not None:
            for stage, queue in self._grant.queues.items():
                self._credit(stage, queue, out)
        if self._stops:
            kept = {*self._held, self._current}
            for ticket in [t for t in self._stops if t <= self._newest and t not in kept]:
                del self._stops[ticket]
        if not self._parked and self._told_vacant < self._num_ended and self._is_vacant:
            self._told_vacant = self._num_ended
            out.append(ToLeader(Vacant(self._num_ended)))
        return out

    def _credit(self, stage: int, queue: list[int], out: list[RingAction]) -> None:
        assert self._grant is not None, "credits without a grant"
        slots = self._stage_slots[stage]
        while queue:
            index = slots[self._next[stage] % len(slots)]
            slot = self._slots[index]
            if slot.state != "free":
                return
            self._next[stage] += 1
            group = queue.pop(0)
            slot.state, slot.ticket, slot.group = "filling", self._grant.ticket, group
            self._held.setdefault(slot.ticket, {})[group] = index
            slot.is_shared = False
            slot.barrier = Barrier(range(len(self._grant.writers[group])))
            for piece in range(len(self._grant.writers[group])):
                self._credit_piece(index, piece, out)
            self._ready_if_whole(slot, out)

    def _credit_piece(self, index: int, piece: int, out: list[RingAction]) -> None:
        assert self._grant is not None, "a credit without a grant"
        slot = self._slots[index]
        writer = self._grant.writers[slot.group][piece]
        stops = self._stops.get(slot.ticket, set())
        if (writer, -1) in stops or (writer, slot.group) in stops:
            return  # it would never write, and never say so again
        slot.may_write.add((writer, piece))
        out.append(GiveCredit(writer, slot.ticket, slot.group, piece, index))

    def _ready_if_whole(self, slot: _Slot, out: list[RingAction]) -> None:
        if not slot.barrier.complete or self._grant is None:
            return
        slot.state = "ready"
        out.append(GroupReady(slot.ticket, slot.group, slot.index))
        grant = self._grant
        grant.num_ready += 1
        if grant.is_given and grant.num_ready in (grant.before_hold, grant.num_groups):
            self._tell_landed(grant, out)

    def _tell_landed(self, grant: _Grant, out: list[RingAction]) -> None:
        """All groups are there, or as many as are to be before the hold."""
        out.append(ToLeader(Landed(grant.ticket, whole=grant.num_ready == grant.num_groups)))

    def _vacate(self, index: int, out: list[RingAction]) -> None:
        """The slot's content is not needed any more."""
        slot = self._slots[index]
        slot.barrier = Barrier(())
        slot.state = "quarantined"
        self._quarantined.add(index)
        if slot.may_write:
            out.append(self._take_back(index))

    def _take_back(self, index: int) -> TakeBack:
        slot = self._slots[index]
        return TakeBack(index, slot.ticket, tuple(sorted({writer for writer, _ in slot.may_write})))

    def _clear(self, slot: _Slot, writer: str) -> None:
        slot.may_write = {(who, piece) for who, piece in slot.may_write if who != writer}

    def _void(self, out: list[RingAction]) -> None:
        if self._grant is None:
            return
        for index in sorted(self._held.get(self._grant.ticket, {}).values()):
            if self._slots[index].state in ("filling", "ready"):
                self._vacate(index, out)
        self._end_grant()

    def _end_grant(self) -> None:
        """Positions advance over an aborted ticket as if it had been taken in full: only we use them."""
        assert self._grant is not None, "no grant to end"
        for stage, queue in self._grant.queues.items():
            self._next[stage] += len(queue)
        self._num_ended += self._grant.is_given
        self._grant = None
