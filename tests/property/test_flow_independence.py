"""An engine that sleeps, wherever in an update, costs those that do not one wait, not one each time."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wbridge.flow.actions import StartGrace, StartPatience, To
from wbridge.flow.messages import Finished, Landed, Offer, Report, Retired, Serve
from wbridge.flow.records import EngineRecord
from wbridge.flow.tickets import Tickets

Place = Literal["awake", "has not offered", "has offered", "holds a version"]


class Fleet:
    """Engines around the product's `Tickets`; those asleep stop at their place in the first update.

    `parks`: they offer only when a version is announced, else in advance.
    """

    def __init__(self, places: list[Place], *, held: bool, parks: bool = False) -> None:
        self.parks = parks
        self.places = {f"engine-{i}": place for i, place in enumerate(places)}
        self.machine = Tickets(
            num_ranks=2,
            engines=tuple(self.places),
            delivery="latest",
            source_held=held,
            lands_when_parked=parks,
        )
        self.awake = {name for name, place in self.places.items() if place == "awake"}
        self.served: dict[str, int] = {}
        self.timer = 0
        self.graces: list[StartGrace] = []
        self.retired = 0
        self._offers: Counter[str] = Counter()
        self._first = [name for name, place in self.places.items() if place != "has not offered"]
        if not parks:
            self.offer(*self._first)

    def offer(self, *names: str) -> None:
        for name in names:
            self._offers[name] += 1
            self.act(self.machine.offer(name, Offer(self._offers[name], parked=self.parks)))

    def announce(self, call: int) -> None:
        for rank in range(2):
            self.act(self.machine.report(rank, Report(call, call)))
        if self.parks:
            self.offer(*(self._first if call == 1 else sorted(self.awake)))

    def act(self, actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, StartPatience):
                self.timer = action.ticket
            elif isinstance(action, StartGrace):
                self.graces.append(action)
            elif isinstance(action, To) and isinstance(action.message, Retired):
                self.retired = action.message.ticket
            elif isinstance(action, To) and isinstance(action.message, Serve):
                for name in action.message.engines:
                    self.take(name, action.message.ticket)

    def take(self, name: str, ticket: int) -> None:
        self.served[name] = ticket
        if self.places[name] != "has offered":
            self.act(self.machine.landed(name, Landed(ticket)))
        if name in self.awake:
            self.act(self.machine.finished(name, Finished(ticket, "applied")))
            if not self.parks:
                self.offer(name)

    def lacks(self, version: int) -> bool:
        """Some engine that is awake does not have it."""
        return any(self.served.get(name) != version for name in self.awake)

    def end_graces(self) -> None:
        graces, self.graces = self.graces, []
        for grace in graces:
            self.act(self.machine.grace_passed(grace.engine, grace.served))


def play(places: list[Place], *, held: bool, parks: bool = False) -> tuple[int, int]:
    """Send a few versions, each once the awake engines have the one before; return how many of them
    an awake engine got only when a patience, or graces, had passed."""
    fleet, num_patiences, num_graces = Fleet(places, held=held, parks=parks), 0, 0
    for version in range(1, 6):
        fleet.announce(version)
        if fleet.lacks(version) and fleet.graces:
            num_graces += 1
            fleet.end_graces()
        if fleet.lacks(version):
            num_patiences += 1
            fleet.act(fleet.machine.patience_passed(fleet.timer))
        assert not fleet.lacks(version)
        assert not held or fleet.retired == version, "the send has not returned"
    return num_patiences, num_graces


places = st.sampled_from(["awake", "has not offered", "has offered", "holds a version"])


@settings(max_examples=60)
@given(st.lists(places, max_size=4))
def test_a_pinned_sender(others: list[Place]) -> None:
    num_patiences, num_graces = play(["awake", *others], held=False)
    assert num_patiences <= ("has not offered" in others)
    assert num_graces <= (not {"has offered", "holds a version"}.isdisjoint(others))


@settings(max_examples=60)
@given(st.lists(places, max_size=4))
def test_a_pinned_sender_and_engines_that_park(others: list[Place]) -> None:
    """A patience and a grace for those that never park, a grace for those that stop when they have."""
    num_patiences, num_graces = play(["awake", *others], held=False, parks=True)
    never, stopped = "has not offered" in others, bool(set(others) - {"awake", "has not offered"})
    assert num_patiences <= never
    assert num_graces <= never + stopped


@settings(max_examples=60)
@given(st.lists(places.filter(lambda place: place != "has offered"), max_size=4))
def test_a_direct_sender(others: list[Place]) -> None:
    """One patience for each that falls asleep, since the send lets nobody catch up. One that sleeps while it
    is being written holds the send itself, until its deadline."""
    num_patiences, num_graces = play(["awake", *others], held=True)
    assert num_patiences <= len(set(others) - {"awake"})
    assert num_graces == 0


def test_an_engine_that_wakes_is_served_at_once() -> None:
    fleet = Fleet(["awake", "holds a version"], held=False)
    for version in range(1, 4):
        fleet.announce(version)
        fleet.end_graces()
    fleet.awake.add("engine-1")
    fleet.act(fleet.machine.finished("engine-1", Finished(1, "applied")))
    fleet.offer("engine-1")
    assert fleet.served == {"engine-0": 3, "engine-1": 3}


class NeverLate(EngineRecord):
    """Lets a grace pass, and is waited for all the same the next time."""

    def end_grace(self, served: int) -> None:
        super().end_grace(served)
        self.late, self.last_grace = False, -1


def test_without_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wbridge.flow.records.EngineRecord", NeverLate)
    with pytest.raises(AssertionError):
        play(["awake", "holds a version"], held=False)
