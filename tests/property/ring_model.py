"""A job for the explorer: writers A and B, each an `Outgoing`, and one receiver, a `ReceiverRing`.

Puts are raw: they land in a slot's memory whoever owns it by then; the notification comes later. Credits,
control, puts, notifications and stop messages have channels of their own, FIFO each, unordered among them.
With `checks` a piece counts only when its bytes have been read, which takes a while. Nothing is drained
before the ring has said that it is as full as it gets.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    ToLeader,
)
from wbridge.flow.messages import Arrived, Landed, Stopped, Vacant
from wbridge.flow.outgoing import Outgoing
from wbridge.flow.ring import Incoming, ReceiverRing

PLAN = (Incoming(("A", "B")), Incoming(("A",)), Incoming(("A", "B")), Incoming(("A",)))
Put = tuple[int, int, int, int]  # ticket, group, piece, slot


class Writer:
    def __init__(self, outgoing: type[Outgoing]) -> None:
        self.outgoing = outgoing()
        self.control: list[tuple[str, int]] = []
        self.credits: list[Put] = []
        self.slots: dict[tuple[int, int, int], int] = {}  # what the credits name
        self.flying: list[Put] = []
        self.flushes: list[tuple[int, int]] = []
        self.notes: list[Arrived] = []
        self.stops: list[Stopped] = []
        self.freed: set[int] = set()
        self.dead = False


class RingWorld:
    def __init__(
        self,
        *,
        num_slots: int = 2,
        num_groups: int = 4,
        aborts: int = 0,
        moves: int = 0,
        deaths: int = 0,
        fences: int = 0,
        epochs: int = 0,
        absent: str = "",
        checks: bool = False,
        expects: bool = False,
        skips: bool = False,
        ring: type[ReceiverRing] = ReceiverRing,
        outgoing: type[Outgoing] = Outgoing,
    ) -> None:
        self.plan = list(PLAN[:num_groups])
        self.granted: dict[int, list[Incoming]] = {}
        self.absent = absent  # a writer that has no part in ticket 1
        self.moves = moves
        self.expects = expects  # credits for ticket 2 are given when ticket 1 is over
        self.last = 3 if skips else 2  # then ticket 2 is not granted to R
        self.slow_checks = checks
        self.checks: list[tuple[str, Arrived, int, int]] = []  # writer, piece, slot and its generation
        self.full = 0  # the ticket that may be drained
        self.budget = {"abort": aborts, "move": moves, "death": deaths, "fence": fences, "epoch": epochs}
        self.ring = ring(num_slots)
        self.writers = {name: Writer(outgoing) for name in "AB"}
        self.control: list[tuple[str, int]] = []
        self.memory: list[set[tuple[int, int, int]]] = [set() for _ in range(num_slots)]
        self.generation = [0] * num_slots  # new memory after a fence
        self.ready: dict[int, tuple[int, int]] = {}  # slot -> (ticket, group)
        self.takes_back: dict[int, int] = {}  # slot -> ticket
        self.unproven: set[tuple[int, str]] = set()  # (slot, writer) of a former epoch
        self.drained: dict[int, int] = dict.fromkeys((1, 2, 3), 0)
        self.open = 0
        self.aborted = 0
        self.fault = ""
        self.receive(self.ring.start())
        self.grant(1)

    # What can happen ----------------------------------------------------------------------------------

    def steps(self) -> Iterator[tuple[Any, ...]]:
        for name, writer in self.writers.items():  # these commute with all else: do them first
            if writer.flushes and not writer.flying and not writer.dead:
                yield f"{name}: has flushed {writer.flushes[0]}", "flushed", name
                return
            if writer.control and writer.control[0][0] == "retire" and not self.moves and not writer.dead:
                yield f"{name}: {writer.control[0]}", "tell", name
                return
        if self.budget["abort"] and self.open == 1 and not self.aborted:
            yield "~coordinator: aborts ticket 1", "abort"
        if self.budget["move"] and self.open == 1 and not self.aborted:
            yield "~coordinator: group 1 of ticket 1 now comes from B", "move"
        if self.control:
            yield f"R: {self.control[0]}", "hear_control"
        for check in self.checks:
            yield f"R: {check[1]} of {check[0]} is checked", "end_check", check
        for slot in sorted(self.ready) if self.full == self.open else ():
            yield f"R: drains slot {slot} {self.ready[slot]}", "drain", slot
        if self.budget["fence"]:
            for slot, ticket in sorted(self.takes_back.items()):
                yield f"~R: fence_timeout_s of slot {slot}", "fence", slot, ticket
        if self.budget["epoch"]:
            yield "~a new epoch", "new_epoch"
        for slot, name in sorted(self.unproven):
            if not any(put[3] == slot and put[0] < 0 for put in self.writers[name].flying):
                yield f"R: transport proves that {name} leaves slot {slot}", "prove", slot, name
        for name, writer in self.writers.items():
            if writer.notes:
                yield f"R: {writer.notes[0]} of {name}", "hear_note", name
            if writer.stops:
                yield f"R: {writer.stops[0]} of {name}", "hear_stop", name
            if writer.flying:
                yield f"{name}: put {writer.flying[0]} lands", "land", name
            if writer.dead:
                continue
            if writer.control:
                yield f"{name}: {writer.control[0]}", "tell", name
            if writer.credits:
                yield f"{name}: credit {writer.credits[0]}", "credit", name
            if self.budget["death"] and name == "B" and self.open == 1:
                yield f"~{name}: dies", "die", name

    # Coordinator --------------------------------------------------------------------------------------

    def grant(self, ticket: int) -> None:
        self.open = ticket
        out = {name for name, writer in self.writers.items() if writer.dead}
        if ticket == 1 and self.absent:
            out.add(self.absent)
        self.granted[ticket] = [Incoming(tuple(w for w in g.writers if w not in out)) for g in self.plan]
        self.say("grant", ticket)

    def new_epoch(self) -> None:
        """Tickets are numbered from 1 again; frames of the old epoch are dropped, its puts still land."""
        self.budget["epoch"] -= 1
        for writer in self.writers.values():
            flying = [(put[0] - 100, *put[1:]) for put in writer.flying]
            writer.__dict__.update(Writer(type(writer.outgoing)).__dict__)
            writer.flying = flying
        for _, _, slot, _ in self.checks:
            self.ring.checked(slot)
        self.checks, self.control, self.ready, self.takes_back = [], [], {}, {}
        self.drained, self.aborted, self.full = dict.fromkeys((1, 2, 3), 0), 0, 0
        self.receive(self.ring.renew())
        self.grant(1)

    def prove(self, slot: int, name: str) -> None:
        self.unproven.remove((slot, name))
        self.receive(self.ring.taken_back(slot, 0, name))

    def say(self, word: str, ticket: int) -> None:
        self.control.append((word, ticket))
        for name, writer in self.writers.items():
            if not writer.dead and not (ticket == 1 and name == self.absent):
                writer.control.append((word, ticket))

    def abort(self) -> None:
        self.budget["abort"] -= 1
        self.aborted = 1
        self.say("abort", 1)

    def move(self) -> None:
        self.budget["move"] -= 1
        self.say("move", 1)

    def ended(self, ticket: int) -> None:
        """The receiver is through with the ticket."""
        for writer in self.writers.values():
            writer.control.append(("retire", ticket))
        self.open = 0
        if ticket != 1:
            return
        if self.last == 3:
            for writer in self.writers.values():
                writer.control.append(("skip", 2))
        self.grant(self.last)

    # Receiver -----------------------------------------------------------------------------------------

    def hear_control(self) -> None:
        word, ticket = self.control.pop(0)
        if word == "grant":
            before_hold = min(len(self.plan), len(self.memory))
            self.receive(self.ring.grant(ticket, self.granted[ticket], before_hold=before_hold))
        elif word == "abort" and self.drained[ticket] < len(self.plan):
            self.ready = {s: key for s, key in self.ready.items() if key[0] != ticket}
            self.receive(self.ring.abort(ticket))
            self.ended(ticket)
        elif word == "move":
            self.receive(self.ring.reassign(ticket, 1, 0, "B"))

    def hear_note(self, name: str) -> None:
        note = self.writers[name].notes.pop(0)
        slot = self.ring.checking(name, note) if self.slow_checks else None
        if slot is None:
            self.receive(self.ring.arrived(name, note))
        else:
            self.checks.append((name, note, slot, self.generation[slot]))

    def end_check(self, check: tuple[str, Arrived, int, int]) -> None:
        self.checks.remove(check)
        name, note, slot, generation = check
        kept = (note.ticket, note.group, note.piece) in self.memory[slot]
        if generation == self.generation[slot] and not kept:
            self.fault = f"slot {slot} is used again while {note} is being checked there"
        self.receive(self.ring.arrived(name, note))
        self.receive(self.ring.checked(slot))

    def hear_stop(self, name: str) -> None:
        self.receive(self.ring.stopped(name, self.writers[name].stops.pop(0)))

    def drain(self, slot: int) -> None:
        ticket, group = self.ready.pop(slot)
        assert self.ring.draining(slot, ticket)
        whole = {(ticket, group, piece) for piece in range(len(self.granted[ticket][group].writers))}
        if self.memory[slot] != whole:
            self.fault = f"group {group} of ticket {ticket} is applied from {sorted(self.memory[slot])}"
        self.drained[ticket] += 1
        self.receive(self.ring.drained(slot))
        if self.drained[ticket] == len(self.plan):
            self.ended(ticket)

    def fence(self, slot: int, ticket: int) -> None:
        self.budget["fence"] -= 1
        del self.takes_back[slot]
        self.receive(self.ring.abandon(slot, ticket))

    def receive(self, actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, GiveCredit):
                self.memory[action.slot] = {k for k in self.memory[action.slot] if k[:2] == key_of(action)}
                writer = self.writers[action.writer]
                slot = action.slot + 100 * self.generation[action.slot]
                writer.credits.append((action.ticket, action.group, action.piece, slot))
            elif isinstance(action, GroupReady):
                self.ready[action.slot] = (action.ticket, action.group)
            elif isinstance(action, TakeBack):
                self.takes_back[action.slot] = action.ticket
                if not action.ticket:
                    self.unproven |= {(action.slot, writer) for writer in action.writers}
                for writer in action.writers:
                    if action.ticket and self.writers[writer].dead:
                        self.receive(self.ring.taken_back(action.slot, action.ticket, writer))
            elif isinstance(action, ReplaceSlot):
                self.generation[action.slot] += 1
                self.receive(self.ring.replaced(action.slot))
            else:
                assert isinstance(action, ToLeader)
                if isinstance(action.message, Vacant) and self.expects and action.message.grants == 1:
                    self.receive(self.ring.expect(2, self.plan))
                if isinstance(action.message, Landed):
                    assert action.message.ticket == self.open
                    assert action.message.whole or self.full != self.open, "full twice"
                    self.full = self.open

    # Writers ------------------------------------------------------------------------------------------

    def tell(self, name: str) -> None:
        writer = self.writers[name]
        word, ticket = writer.control.pop(0)
        out = writer.outgoing
        if word == "grant":
            pieces = [
                (g, p)
                for g, group in enumerate(self.granted[ticket])
                for p, who in enumerate(group.writers)
                if who == name
            ]
            self.write(name, [*out.announced(ticket), *out.serve(ticket, {"R": pieces})])
        elif word == "abort":
            self.write(name, out.aborted(ticket, ["R"]))
        elif word == "skip":
            self.write(name, [*out.announced(ticket), *out.retired(ticket)])
        elif word == "retire":
            self.write(name, out.retired(ticket))
        elif name == "A":
            self.write(name, out.give_up("R", ticket, 1, 0))
        else:
            self.write(name, out.take_over("R", ticket, 1, 0))

    def credit(self, name: str) -> None:
        writer = self.writers[name]
        ticket, group, piece, slot = writer.credits.pop(0)
        writer.slots[ticket, group, piece] = slot
        self.write(name, writer.outgoing.credit("R", ticket, group, piece))

    def land(self, name: str) -> None:
        ticket, group, piece, slot = self.writers[name].flying.pop(0)
        generation, slot = divmod(slot, 100)
        if generation == self.generation[slot]:
            held = self.ring._slots[slot]
            safe = held.state == "quarantined" if ticket < 0 else held.state != "free"
            if not safe or (ticket > 0 and (held.ticket, held.group) != (ticket, group)):
                self.fault = (
                    f"late write: piece {piece} of group {group} of ticket {ticket} lands in slot {slot}, "
                    f"which is {held.state} for group {held.group} of ticket {held.ticket}"
                )
            self.memory[slot].add((ticket, group, piece))
        if not self.writers[name].dead and ticket > 0:
            self.writers[name].notes.append(Arrived(ticket, group, piece))

    def flushed(self, name: str) -> None:
        writer = self.writers[name]
        self.write(name, writer.outgoing.flushed("R", *writer.flushes.pop(0)))

    def die(self, name: str) -> None:
        """Nothing of it flies any more, which the transport proves, and its ticket is aborted for it."""
        self.budget["death"] -= 1
        writer = self.writers[name]
        writer.dead = True
        writer.control, writer.credits, writer.flying, writer.flushes = [], [], [], []
        writer.freed = set(range(1, self.last + 1))
        for slot, ticket in list(self.takes_back.items()):
            self.receive(self.ring.taken_back(slot, ticket, name))
        if not self.aborted:
            self.aborted = 1
            self.say("abort", 1)

    def write(self, name: str, actions: list[Any]) -> None:
        writer = self.writers[name]
        for action in actions:
            if isinstance(action, StartPut):
                key = (action.ticket, action.group, action.piece)
                writer.flying.append((*key, writer.slots.pop(key)))
                # the source is read at once; landing is what a flush waits for
                self.write(name, writer.outgoing.put_ended("R", *key))
            elif isinstance(action, Flush):
                writer.flushes.append((action.ticket, action.group))
            elif isinstance(action, SendStopped):
                writer.stops.append(Stopped(action.ticket, action.group))
            elif isinstance(action, FreeSource):
                assert action.ticket not in writer.freed, "freed twice"
                writer.freed.add(action.ticket)
            else:
                assert isinstance(action, CancelPut)

    # Judgement -----------------------------------------------------------------------------------------

    def bad(self) -> str:
        users: dict[int, set[tuple[int, int]]] = {}
        for writer in self.writers.values():
            for ticket, group, _, slot in writer.flying:
                users.setdefault(slot, set()).add((ticket, group))
        for slot, keys in users.items():
            if len(keys) > 1:
                return f"slot {slot} is being written for {sorted(keys)}"
        return self.fault

    def good_end(self) -> bool:
        done = self.drained[self.last] == len(self.plan) and set(self.ring.states) <= {"free", "filling"}
        freed = set(range(1, self.last + 1))
        return done and all(
            w.freed | ({1} if n == self.absent else set()) == freed for n, w in self.writers.items()
        )


def key_of(action: GiveCredit) -> tuple[int, int]:
    return action.ticket, action.group
