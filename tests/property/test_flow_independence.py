"""An engine that sleeps, wherever in an update, costs those that do not one patience, not one each time."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wbridge.flow.actions import StartPatience, To
from wbridge.flow.messages import Finished, Landed, Offer, Report, Retired, Serve
from wbridge.flow.tickets import Tickets

Place = Literal["awake", "has not offered", "has offered", "holds a version"]


class Fleet:
    """Engines around the product's `Tickets`; those asleep stop at their place in the first update."""

    def __init__(self, places: list[Place], *, held: bool) -> None:
        self.places = {f"engine-{i}": place for i, place in enumerate(places)}
        self.machine = Tickets(
            num_ranks=2,
            engines=tuple(self.places),
            delivery="latest",
            source_held=held,
            lands_when_parked=False,
        )
        self.awake = {name for name, place in self.places.items() if place == "awake"}
        self.served: dict[str, int] = {}
        self.timer = 0
        self.retired = 0
        self._offers: Counter[str] = Counter()
        for name, place in self.places.items():
            if place != "has not offered":
                self.offer(name)

    def offer(self, name: str) -> None:
        self._offers[name] += 1
        self.act(self.machine.offer(name, Offer(self._offers[name])))

    def announce(self, call: int) -> None:
        for rank in range(2):
            self.act(self.machine.report(rank, Report(call, call)))

    def act(self, actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, StartPatience):
                self.timer = action.ticket
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
            self.offer(name)


def play(places: list[Place], *, held: bool) -> int:
    """Send a few versions, each once the awake engines have the one before; return how many of them
    an awake engine got only when a patience had passed."""
    fleet, num_waits = Fleet(places, held=held), 0
    for version in range(1, 6):
        fleet.announce(version)
        if any(fleet.served.get(name) != version for name in fleet.awake):
            num_waits += 1
            fleet.act(fleet.machine.patience_passed(fleet.timer))
        assert all(fleet.served[name] == version for name in fleet.awake)
        assert not held or fleet.retired == version, "the send has not returned"
    return num_waits


places = st.sampled_from(["awake", "has not offered", "has offered", "holds a version"])


@settings(max_examples=60)
@given(st.lists(places, max_size=4))
def test_a_pinned_sender(others: list[Place]) -> None:
    assert play(["awake", *others], held=False) <= ("has not offered" in others)


@settings(max_examples=60)
@given(st.lists(places.filter(lambda place: place != "has offered"), max_size=4))
def test_a_direct_sender(others: list[Place]) -> None:
    """One patience for each that falls asleep, since the send lets nobody catch up. One that sleeps while it
    is being written holds the send itself, until its deadline."""
    assert play(["awake", *others], held=True) <= len(set(others) - {"awake"})


def test_an_engine_that_wakes_is_served_at_once() -> None:
    fleet = Fleet(["awake", "holds a version"], held=False)
    for version in range(1, 4):
        fleet.announce(version)
    fleet.awake.add("engine-1")
    fleet.act(fleet.machine.finished("engine-1", Finished(1, "applied")))
    fleet.offer("engine-1")
    assert fleet.served == {"engine-0": 3, "engine-1": 3}


class WaitsForAll(Tickets):
    def _is_awaited(self, *_: Any) -> bool:
        return True


def test_without_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.Tickets", WaitsForAll)
    assert play(["awake", "holds a version"], held=False) == 4
