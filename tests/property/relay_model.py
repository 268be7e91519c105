"""Members of an exchange as the real rings and writers, moved one step at a time in any order."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

from wbridge.flow.actions import (
    CancelPut,
    Flush,
    FreeSource,
    GiveCredit,
    GroupReady,
    ReplaceSlot,
    SendStopped,
    StartPut,
    TakeBack,
)
from wbridge.flow.messages import Arrived, Stopped
from wbridge.flow.outgoing import Outgoing
from wbridge.flow.ring import Incoming, ReceiverRing
from wbridge.plan.routes import iter_hops
from wbridge.plan.types import Exchange

Key = tuple[int, int]
"""Group, piece."""

TICKET = 1


class Writer:
    """A trainer, or a member in its role as a relay."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.outgoing = Outgoing()
        self.flying: list[tuple[str, Key]] = []
        self.cancelled: set[tuple[str, Key]] = set()  # of these a notification may come, or may not
        self.strayed: set[tuple[str, Key]] = set()  # of these: bytes that are there, and nobody is told
        self.written: list[tuple[str, Key]] = []


class Member(Writer):
    def __init__(self, name: str, num_slots: int) -> None:
        super().__init__(name)
        self.ring = ReceiverRing(num_slots)
        self.pieces: set[Key] = set()
        self.sources: dict[int, str] = {}
        self.duties: dict[int, dict[str, int]] = {}  # by group: receivers, and which of theirs it is
        self.slots: dict[tuple[str, Key], int] = {}  # (writer, piece) credited
        self.targets: dict[tuple[str, Key], int] = {}  # the memory that the credit names
        self.kept: dict[
            tuple[str, Key], tuple[int, int, Key]
        ] = {}  # (receiver, piece): slot, place, own piece
        self.pending: set[tuple[str, Key]] = set()
        self.has: dict[Key, int] = {}  # what has come, and how often it counted
        self.memory: dict[int, tuple[int, set[Key]]] = {}  # by place: the group, and what has been written
        self.ready: dict[int, int] = {}
        self.drained: list[int] = []
        self.fences: set[int] = set()
        self.places = list(range(num_slots))  # of each slot, until other memory replaces it
        self.is_granted = self.is_silent = False
        self.stopped_early: set[str] = set()
        self.wrong: set[tuple[int, Key]] = set()  # by place: what was damaged on its way
        self.reading: tuple[int, int, bool] | None = None  # group, slot, whether what was read was right
        self.distrusted: set[str] = set()
        self.fate = ""  # how it has ended, other than with the version

    def owes(self, receiver: str, group: int) -> bool:
        return any(own.get(receiver) == group for own in self.duties.values())


class RelayWorld:
    """One ticket. `random` chooses what happens next; `steps` lists what can."""

    def __init__(
        self,
        exchanges: tuple[Exchange, ...],
        engines: set[str],
        *,
        num_trainers: int,
        num_slots: int,
        silent: str = "",
        gives_up: str = "",
        damages: str = "",
        late_only: bool = False,
        chooser: random.Random,
    ) -> None:
        self.random = chooser
        self.silent, self.gives_up = silent, gives_up
        self.damages, self.late_only = damages, late_only
        self.num_trainers = num_trainers
        self.trainers = {f"t{k}": Writer(f"t{k}") for k in range(num_trainers)}
        self.members: dict[str, Member] = {}
        self.channels: dict[tuple[str, str], deque[Callable[[], None]]] = {}
        for exchange in exchanges:
            for worker, numbers in zip(exchange.members, exchange.numbers, strict=True):
                if worker.group in engines:
                    member = self.members.setdefault(str(worker), Member(str(worker), num_slots))
                    member.pieces |= {(g, k) for g in numbers for k in range(num_trainers)}
        for hop in iter_hops(exchanges, engines):
            self.members[str(hop.receiver)].sources[hop.received] = str(hop.sender)
            to = self.members[str(hop.sender)].duties.setdefault(hop.sent, {})
            to[str(hop.receiver)] = hop.received
        for member in self.members.values():
            self.post("", member.name, lambda m=member: self.grant(m))
        for trainer in self.trainers.values():
            self.post("", trainer.name, lambda t=trainer: self.serve(t))

    def post(self, sender: str, receiver: str, event: Callable[[], None]) -> None:
        self.channels.setdefault((sender, receiver), deque()).append(event)

    # What can happen ----------------------------------------------------------------------------------

    def run(self) -> None:
        while steps := list(self.steps()):
            self.random.choice(steps)()

    def steps(self) -> Any:
        for (_, receiver), events in self.channels.items():
            if events and not self.is_stopped(receiver):
                yield lambda e=events: e.popleft()()
        for writer in (*self.trainers.values(), *self.members.values()):
            for put in writer.flying:
                if not self.is_stopped(writer.name):
                    yield lambda w=writer, p=put: self.land(w, *p)
                elif writer.name == self.damages and put not in writer.strayed:
                    yield lambda w=writer, p=put: self.stray(w, *p)
        for member in self.members.values():
            if member.is_silent:
                continue
            following = len(member.drained)
            if member.reading:
                yield lambda m=member: self.drain(m)
            elif following in member.ready and not member.fate:
                yield lambda m=member, g=following: self.read(m, g)
            for slot in sorted(member.fences):
                if self.silent and self.members[self.silent].is_silent:
                    yield lambda m=member, s=slot: self.fence(m, s)
            if member.name == self.silent and (member.flying or not self.damages):
                yield lambda m=member: self.fall_silent(m)
            if member.name == self.gives_up and member.is_granted:
                yield lambda m=member: self.give_up(m)

    def is_stopped(self, name: str) -> bool:
        return name in self.members and self.members[name].is_silent

    # Members as receivers -----------------------------------------------------------------------------

    def grant(self, member: Member) -> None:
        member.is_granted = True
        member.sources = {g: s for g, s in member.sources.items() if s not in member.stopped_early}
        duties: dict[str, set[Key]] = {}
        for own in member.duties.values():
            for receiver, number in own.items():
                duties.setdefault(receiver, set()).update((number, k) for k in range(self.num_trainers))
        self.write(member, member.outgoing.announced(TICKET))
        self.write(member, member.outgoing.serve(TICKET, duties))
        incoming = [
            Incoming(tuple(member.sources.get(g, f"t{k}") for k in range(self.num_trainers)))
            for g in range(len(member.pieces) // self.num_trainers)
        ]
        self.take(member, member.ring.grant(TICKET, incoming))

    def take(self, member: Member, actions: list[Any]) -> None:
        for action in actions:
            match action:
                case GiveCredit(writer, _, group, piece, slot):
                    key = (group, piece)
                    place = member.places[slot]
                    if place not in member.memory or member.memory[place][0] != group:
                        member.memory[place] = (group, set())
                        member.wrong = {wrong for wrong in member.wrong if wrong[0] != place}
                    member.slots[writer, key] = slot
                    member.targets[writer, key] = place
                    self.post(member.name, writer, lambda w=writer, k=key: self.credit(w, member.name, k))
                case GroupReady(_, group, slot):
                    member.ready[group] = slot
                case TakeBack(slot):
                    member.fences.add(slot)
                case ReplaceSlot(slot):
                    member.places[slot] += 100
                    self.take(member, member.ring.replaced(slot))

    def arrive(self, member: Member, writer: str, key: Key) -> None:
        slot = member.slots.pop((writer, key), None)
        if slot is None or member.fate:
            return
        if (member.places[slot], key) in member.wrong and member.ring.states[slot] in ("filling", "ready"):
            return self.refuse(member, writer, key)
        if key not in member.has:
            member.has[key] = 0
            for receiver, number in sorted(member.duties.get(key[0], {}).items()):
                member.ring.keep(slot)
                there = number, key[1]
                member.kept[receiver, there] = slot, member.places[slot], key
                if (receiver, there) in member.pending:
                    member.pending.remove((receiver, there))
                    self.write(member, member.outgoing.credit(receiver, TICKET, *there))
        member.has[key] += 1
        self.take(member, member.ring.arrived(writer, Arrived(TICKET, *key)))

    def read(self, member: Member, group: int) -> None:
        """The copy into the parameters begins; what it reads may change until it is over."""
        slot = member.ready.pop(group)
        place = member.places[slot]
        assert member.memory[place] == (group, {(group, k) for k in range(self.num_trainers)})
        assert member.ring.draining(slot, TICKET)
        assert all((group, k) in member.has for k in range(self.num_trainers)), "a group with a hole"
        member.reading = group, slot, self.is_right(member, place)

    def drain(self, member: Member) -> None:
        assert member.reading
        group, slot, was_right = member.reading
        member.reading = None
        if member.ring.is_shared(slot) and not self.is_right(member, member.places[slot]):
            return self.end(member, "tainted")
        assert was_right, "wrong bytes were applied, and nobody knows"
        member.drained.append(group)
        self.take(member, member.ring.drained(slot))

    def is_right(self, member: Member, place: int) -> bool:
        return all(wrong[0] != place for wrong in member.wrong)

    def fence(self, member: Member, slot: int) -> None:
        member.fences.remove(slot)
        self.take(member, member.ring.abandon(slot, TICKET))

    def refuse(self, member: Member, writer: str, key: Key) -> None:
        """What has come is not what the trainer has sent."""
        if member.sources.get(key[0]) != writer:
            return self.end(member, "aborted")
        member.distrusted.add(writer)
        self.post(member.name, writer, lambda w=self.members[writer]: self.drop(w, member.name))

    def end(self, member: Member, fate: str) -> None:
        """It gives the version up, and with it what it was to pass on."""
        member.fate = fate
        self.take(member, member.ring.abort(TICKET))
        for receiver in sorted({r for own in member.duties.values() for r in own}):
            self.drop(member, receiver)

    def bypass(self, member: Member, relay: str, *, has_stopped: bool = False) -> None:
        if member.fate:
            return
        if relay in member.distrusted and relay in member.sources.values() and not has_stopped:
            return self.end(member, "aborted")
        member.stopped_early.add(relay)
        if not member.is_granted:
            return
        for group in [g for g, source in member.sources.items() if source == relay]:
            del member.sources[group]
            for k in range(self.num_trainers):
                self.take(member, member.ring.reassign(TICKET, group, k, f"t{k}"))

    def stopped(self, member: Member, writer: str, group: int) -> None:
        self.take(member, member.ring.stopped(writer, Stopped(TICKET, group)))
        if writer in self.members:
            member.stopped_early.add(writer)
            if member.is_granted:
                self.bypass(member, writer, has_stopped=True)

    # Writers ------------------------------------------------------------------------------------------

    def serve(self, trainer: Writer) -> None:
        own = {
            m.name: {key for key in m.pieces if f"t{key[1]}" == trainer.name} for m in self.members.values()
        }
        due = {
            name: {k for k in keys if k[0] not in self.members[name].sources} for name, keys in own.items()
        }
        spare = {name: own[name] - keys for name, keys in due.items()}
        self.write(trainer, trainer.outgoing.announced(TICKET))
        self.write(trainer, trainer.outgoing.serve(TICKET, due, spare))

    def credit(self, writer: str, receiver: str, key: Key) -> None:
        member = self.members.get(writer)
        if member is None:
            trainer = self.trainers[writer]
            self.write(trainer, trainer.outgoing.credit(receiver, TICKET, *key))
        elif (receiver, key) in member.kept or not member.owes(receiver, key[0]):
            self.write(member, member.outgoing.credit(receiver, TICKET, *key))
        else:
            member.pending.add((receiver, key))

    def write(self, writer: Writer, actions: list[Any]) -> None:
        for action in actions:
            match action:
                case StartPut(receiver, _, group, piece):
                    writer.flying.append((receiver, (group, piece)))
                case Flush(receiver, _, group):
                    self.write(writer, writer.outgoing.flushed(receiver, TICKET, group))
                case SendStopped(receiver, _, group):
                    member = self.members[receiver]
                    self.post(
                        writer.name,
                        receiver,
                        lambda m=member, g=group: self.stopped(m, writer.name, g),
                    )
                case CancelPut(receiver, _, group, piece):
                    writer.cancelled.add((receiver, (group, piece)))
                case FreeSource():
                    pass

    def land(self, writer: Writer, receiver: str, key: Key) -> None:
        writer.flying.remove((receiver, key))
        writer.written.append((receiver, key))
        member = self.members[receiver]
        group, there = member.memory[member.targets[writer.name, key]]
        assert group == key[0], "a late write"
        there.add(key)
        self.spoil(writer, member, key, late=(receiver, key) in writer.cancelled)
        if (receiver, key) not in writer.cancelled or self.random.choice((True, False)):
            self.post(writer.name, receiver, lambda: self.arrive(member, writer.name, key))
        if isinstance(writer, Member) and (kept := writer.kept.pop((receiver, key), None)) is not None:
            slot, place, own = kept
            assert writer.memory[place][0] == own[0], "it is gone before it is passed on"
            assert own in writer.memory[place][1], "it is passed on before it is there"
            self.take(writer, writer.ring.checked(slot))
        self.write(writer, writer.outgoing.put_ended(receiver, TICKET, *key))

    # Faults -------------------------------------------------------------------------------------------

    def spoil(self, writer: Writer, member: Member, key: Key, *, late: bool) -> None:
        """The bytes that are there now are right or wrong, as `writer` has them, or damages them."""
        place = member.targets[writer.name, key]
        kept = writer.kept.get((member.name, key)) if isinstance(writer, Member) else None
        is_damaged = writer.name == self.damages and (late or not self.late_only)
        is_wrong = is_damaged or (kept is not None and kept[1:] in writer.wrong)
        (member.wrong.add if is_wrong else member.wrong.discard)((place, key))

    def stray(self, writer: Writer, receiver: str, key: Key) -> None:
        """A put of one that is stopped has got somewhere all the same."""
        writer.strayed.add((receiver, key))
        member = self.members[receiver]
        if member.memory[member.targets[writer.name, key]][0] == key[0]:
            self.spoil(writer, member, key, late=True)

    def fall_silent(self, member: Member) -> None:
        """It does nothing any more; those that wait for it lose patience, and those that it keeps waiting."""
        member.is_silent = True
        for other in self.members.values():
            if other is not member:
                self.post("patience", other.name, lambda m=other: self.bypass(m, member.name))
                self.post("patience", other.name, lambda m=other: self.drop(m, member.name))

    def give_up(self, member: Member) -> None:
        self.gives_up = ""
        for receiver in {r for own in member.duties.values() for r in own}:
            self.drop(member, receiver)

    def drop(self, relay: Member, receiver: str) -> None:
        for own in relay.duties.values():
            own.pop(receiver, None)
        relay.pending = {duty for duty in relay.pending if duty[0] != receiver}
        self.write(relay, relay.outgoing.aborted(TICKET, [receiver]))
        for duty in [d for d in relay.kept if d[0] == receiver and d not in relay.flying]:
            self.take(relay, relay.ring.checked(relay.kept.pop(duty)[0]))
