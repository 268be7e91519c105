"""Routes reach every member once; and whatever the order of events, no ring deadlocks and no byte is lost."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.property.relay_model import RelayWorld
from wbridge.ids import WorkerId
from wbridge.plan.routes import duties_of, find_routes
from wbridge.plan.types import Exchange


@st.composite
def exchanges(draw: st.DrawFn, most: int = 6, groups: int = 24) -> Exchange:
    count = draw(st.integers(2, most))
    members = tuple(WorkerId("rollout", f"engine-{k}", (1,), (0,)) for k in range(count))
    shares = st.lists(st.integers(1, 1000), min_size=count, max_size=count).map(tuple)
    hosts = draw(st.lists(st.sampled_from("abc"), min_size=count, max_size=count))
    return Exchange(members, tuple(hosts), draw(shares), draw(shares), draw(st.integers(1, groups)))


def subsets(draw: st.DrawFn, exchange: Exchange) -> set[str]:
    names = [member.group for member in exchange.members]
    return set(draw(st.lists(st.sampled_from(names), min_size=1)))


@given(st.data())
def test_every_member_gets_every_group_once_and_every_host_once_from_outside(data: st.DataObject) -> None:
    exchange = data.draw(exchanges())
    engines = subsets(data.draw, exchange)
    routes = find_routes(exchange, engines)
    assert {member.group for member in routes} == engines
    host_of = dict(zip(exchange.members, exchange.hosts, strict=True))
    for group in range(exchange.num_groups):
        entries = [member for member, sources in routes.items() if sources[group] is None]
        assert len(entries) == 1
        outside = [
            host_of[member]
            for member, sources in routes.items()
            if (source := sources[group]) is not None and host_of[source] != host_of[member]
        ]
        assert sorted(outside) == sorted({host_of[m] for m in routes} - {host_of[entries[0]]})
        for member in routes:  # back to the trainers in three hops at most
            at, hops = member, 0
            while (source := routes[at][group]) is not None:
                at, hops = source, hops + 1
                assert hops <= 2
    for member in routes:
        for group, receivers in duties_of(member, routes).items():
            assert all(routes[receiver][group] == member for receiver in receivers)


@given(st.data())
def test_entries_follow_their_shares(data: st.DataObject) -> None:
    exchange = data.draw(exchanges(groups=200))
    routes = find_routes(exchange, {member.group for member in exchange.members})
    for member, share in zip(exchange.members, exchange.entries, strict=True):
        entered = sum(source is None for source in routes[member])
        due = exchange.num_groups * share / sum(exchange.entries)
        assert abs(entered - due) < len(exchange.members)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_nothing_deadlocks_and_everything_arrives_once(data: st.DataObject) -> None:
    """Without faults trainers send one copy, whatever the rings and the order of events."""
    exchange = data.draw(exchanges(most=5, groups=9))
    world = RelayWorld(
        exchange,
        subsets(data.draw, exchange),
        num_trainers=data.draw(st.integers(1, 3)),
        num_slots=data.draw(st.integers(1, 3)),
        chooser=random.Random(data.draw(st.integers(0, 2**32))),
    )
    world.run()
    for member in world.members.values():
        assert member.drained == list(range(exchange.num_groups))
        assert set(member.ring.states) == {"free"} and not member.kept and not member.pending
        assert member.has == dict.fromkeys(world.pieces, 1)
    written = [key for trainer in world.trainers.values() for _, key in trainer.written]
    assert sorted(written) == sorted(world.pieces)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_the_others_have_the_version_when_a_relay_falls_silent_or_gives_up(data: st.DataObject) -> None:
    exchange = data.draw(exchanges(most=5, groups=7))
    names = [member.group for member in exchange.members]
    victim = data.draw(st.sampled_from(names))
    is_silent = data.draw(st.booleans())
    world = RelayWorld(
        exchange,
        set(names),
        num_trainers=data.draw(st.integers(1, 2)),
        num_slots=data.draw(st.integers(1, 3)),
        silent=victim if is_silent else "",
        gives_up="" if is_silent else victim,
        chooser=random.Random(data.draw(st.integers(0, 2**32))),
    )
    world.run()
    for member in world.members.values():
        if member.name != victim or not is_silent:
            assert member.drained == list(range(exchange.num_groups)), member.name
            assert set(member.ring.states) == {"free"} and not member.kept


@given(st.data())
@settings(max_examples=250, deadline=None)
def test_no_wrong_byte_of_a_relay_is_applied_unnoticed(data: st.DataObject) -> None:
    """It damages all that it passes on, or what it is not to any more; it may fall silent, so that nobody
    hears of what still lands."""
    exchange = data.draw(exchanges(most=4, groups=6))
    names = [member.group for member in exchange.members]
    victim = data.draw(st.sampled_from(names))
    world = RelayWorld(
        exchange,
        set(names),
        num_trainers=data.draw(st.integers(1, 2)),
        num_slots=data.draw(st.integers(1, 3)),
        silent=victim if data.draw(st.booleans()) else "",
        damages=victim,
        late_only=data.draw(st.booleans()),
        chooser=random.Random(data.draw(st.integers(0, 2**32))),
    )
    world.run()
    for member in world.members.values():
        if not member.is_silent:
            assert member.fate or member.drained == list(range(exchange.num_groups)), member.name
