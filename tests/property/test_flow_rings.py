"""All interleavings of small jobs of slots and credits, run on the product's own state machines.

The models pass as they are, and fail when one rule of the protocol is switched off: a model that can not
fail shows nothing. `C1` to `C5` are the rules switched off.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.property.explorer import case, explore
from tests.property.ring_model import RingWorld
from wbridge.flow.actions import TakeBack
from wbridge.flow.messages import Arrived, Stopped
from wbridge.flow.outgoing import Outgoing
from wbridge.flow.ring import ReceiverRing


@pytest.mark.parametrize(
    "options",
    [
        case(num_groups=4),
        case(num_groups=3, num_slots=1),
        case(num_groups=3, absent="B"),
        case(num_groups=3, moves=1),
        case(num_groups=2, num_slots=1, aborts=1),
        case(num_groups=3, deaths=1),
        case(num_groups=2, expects=True),
        case(num_groups=2, expects=True, skips=True),
        case(num_groups=2, num_slots=1, epochs=1),
        case(num_groups=2, num_slots=1, aborts=1, checks=True),
        case(num_groups=2, num_slots=1, deaths=1, checks=True),
        case(slow=True, num_groups=2, num_slots=1, aborts=1, fences=1, checks=True),
        case(slow=True, num_groups=3, num_slots=2, aborts=1, checks=True),
        case(slow=True, num_groups=3, epochs=1),
        case(slow=True, num_groups=2, num_slots=1, expects=True, skips=True, aborts=1),
        case(slow=True, num_groups=2, num_slots=2, aborts=1),
        case(slow=True, num_groups=3, num_slots=1, aborts=1, fences=1),
        case(slow=True, num_groups=3, aborts=1),
        case(slow=True, num_groups=4, moves=1),
    ],
)
def test_rings(options: dict[str, Any]) -> None:
    found = explore(RingWorld(**options))
    assert not found.verdict, str(found)


class CreditsOnlyFreedSlots(ReceiverRing):
    """C1 off: taking a grant gives no credits."""

    def grant(self, ticket: int, groups: Any, *, before_hold: int = 0) -> list[Any]:
        before, self._credit = self._credit, lambda *_: None  # type: ignore[method-assign]
        try:
            return super().grant(ticket, groups, before_hold=before_hold)
        finally:
            del self.__dict__["_credit"]
            del before


class WritersCountSlots(RingWorld):
    """C2 off: each writer works the slot out from the grants that it has seen."""

    def credit(self, name: str) -> None:
        ticket, group, piece, _ = self.writers[name].credits[0]
        seen = ticket - 1 - (name == self.absent)
        slot = (seen * len(self.plan) + group) % len(self.memory)
        self.writers[name].credits[0] = (ticket, group, piece, slot)
        super().credit(name)


class StopsOnlyForTheTicket(Outgoing):
    """C3 off: a writer that loses a range says so only when it is through with the ticket."""

    def give_up(self, receiver: str, ticket: int, group: int, piece: int) -> list[Any]:
        share = self._share(ticket, receiver)
        if share is not None:
            share.due.discard((group, piece))
        return []


class KeepsStillAboutTheUnserved(Outgoing):
    """Who gave credits in advance, and was not granted the ticket, does not hear that it is over."""

    def retired(self, ticket: int) -> list[Any]:
        source = self._sources.get(ticket)
        if source is not None:
            source.early.clear()
        return super().retired(ticket)


class ForgetsStops(ReceiverRing):
    """C4 off."""

    def stopped(self, writer: str, message: Stopped) -> list[Any]:
        out = super().stopped(writer, message)
        self._stops.clear()
        return out


class NoFence(ReceiverRing):
    """C5 off: a slot is free although a credited writer may still write it."""

    def _vacate(self, index: int, out: list[Any]) -> None:
        self._slots[index].may_write.clear()
        super()._vacate(index, out)


class NeverFull(ReceiverRing):
    """The leader hears only of whole versions."""

    def grant(self, ticket: int, groups: Any, *, before_hold: int = 0) -> list[Any]:
        return super().grant(ticket, groups)


class FreesWhatIsChecked(ReceiverRing):
    """A slot is free when its writers have stopped, although its bytes are still being read."""

    def checking(self, writer: str, message: Arrived) -> int | None:
        slot = super().checking(writer, message)
        if slot is not None:
            super().checked(slot)
        return slot

    def checked(self, slot: int) -> list[Any]:
        return []


class ForgetsTheQuarantine(ReceiverRing):
    """A new epoch starts with free slots, although writers of the old one may still be writing."""

    def renew(self) -> list[Any]:
        out = super().renew()
        for slot in self._slots:
            slot.may_write.clear()
        self._go_on([])
        return [action for action in out if not isinstance(action, TakeBack)]


@pytest.mark.parametrize(
    ("verdict", "world", "options"),
    [
        case("late write", RingWorld, num_groups=2, num_slots=1, epochs=1, ring=ForgetsTheQuarantine),
        case("stuck", RingWorld, num_groups=2, ring=CreditsOnlyFreedSlots),
        case("stuck", RingWorld, num_groups=2, num_slots=1, ring=NeverFull),
        case(
            "being checked",
            RingWorld,
            num_groups=2,
            num_slots=1,
            aborts=1,
            checks=True,
            ring=FreesWhatIsChecked,
        ),
        case("late write", WritersCountSlots, num_groups=3, absent="B"),
        case("stuck", RingWorld, num_groups=4, moves=1, outgoing=StopsOnlyForTheTicket),
        case("stuck", RingWorld, num_groups=2, num_slots=1, aborts=1, ring=ForgetsStops),
        case("late write", RingWorld, num_groups=2, num_slots=1, aborts=1, ring=NoFence),
        case("stuck", RingWorld, num_groups=2, expects=True, skips=True, outgoing=KeepsStillAboutTheUnserved),
    ],
)
def test_rings_without_a_rule(verdict: str, world: type[RingWorld], options: dict[str, Any]) -> None:
    found = explore(world(**options))
    assert verdict in found.verdict, str(found)
