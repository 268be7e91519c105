"""Hops reach every member once; and whatever the order of events, no ring deadlocks and no byte is lost."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.property.relay_model import RelayWorld
from wbridge.ids import WorkerId
from wbridge.plan.routes import iter_hops, partners_of
from wbridge.plan.types import Exchange


@st.composite
def exchanges(draw: st.DrawFn, most: int = 6, groups: int = 24, ranks: int = 3) -> Exchange:
    """Engines of up to so many ranks, all of which need the same; an engine may lie on several hosts."""
    members: list[WorkerId] = []
    for k in range(draw(st.integers(2, most))):
        size = draw(st.integers(1, ranks))
        members += [WorkerId("rollout", f"engine-{k}", (size,), (rank,)) for rank in range(size)]
    count = len(members)
    shares = st.lists(st.integers(1, 1000), min_size=count, max_size=count).map(tuple)
    hosts = draw(st.lists(st.sampled_from("abc"), min_size=count, max_size=count))
    sizes = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=groups)))
    numbers = (tuple(range(len(sizes))),) * count
    return Exchange(tuple(members), tuple(hosts), draw(shares), draw(shares), numbers, sizes)


@st.composite
def several(draw: st.DrawFn, most: int, groups: int) -> tuple[Exchange, ...]:
    """Exchanges among engines of one worker that have groups in common, in one order, as plans have them."""
    count, num_groups = draw(st.integers(2, most)), draw(st.integers(1, groups))
    workers = [WorkerId("rollout", f"engine-{k}", (1,), (0,)) for k in range(count)]
    host_of = [draw(st.sampled_from("abc")) for _ in workers]
    seen: dict[tuple[int, ...], list[int]] = {}
    for group in range(num_groups):
        sets = st.sets(st.integers(0, count - 1), min_size=1).map(lambda own: tuple(sorted(own)))
        seen.setdefault(draw(sets), []).append(group)
    order = {
        k: [g for g in range(num_groups) if any(k in own and g in seen[own] for own in seen)]
        for k in range(count)
    }
    return tuple(
        Exchange(
            tuple(workers[k] for k in own),
            tuple(host_of[k] for k in own),
            tuple(draw(st.integers(1, 9)) for _ in own),
            tuple(draw(st.integers(1, 9)) for _ in own),
            tuple(tuple(order[k].index(group) for group in groups_of) for k in own),
            tuple(draw(st.integers(1, 9)) for _ in groups_of),
        )
        for own, groups_of in seen.items()
    )


def names_of(found: tuple[Exchange, ...]) -> list[str]:
    return sorted({member.group for exchange in found for member in exchange.members})


def subsets(draw: st.DrawFn, found: tuple[Exchange, ...]) -> set[str]:
    return set(draw(st.lists(st.sampled_from(names_of(found)), min_size=1)))


@given(st.data())
def test_every_member_gets_every_group_once_and_every_host_once_from_outside(data: st.DataObject) -> None:
    exchange = data.draw(exchanges())
    engines = subsets(data.draw, (exchange,))
    here = {member for member in exchange.members if member.group in engines}
    host_of = dict(zip(exchange.members, exchange.hosts, strict=True))
    sources: dict[tuple[WorkerId, int], WorkerId] = {}
    for hop in iter_hops((exchange,), engines):
        assert hop.sent == hop.received and (hop.receiver, hop.received) not in sources
        assert hop.receiver in partners_of(exchange, hop.sender)
        assert hop.sender in partners_of(exchange, hop.receiver)
        sources[hop.receiver, hop.received] = hop.sender
    for group in range(len(exchange.sizes)):
        first = [member for member in here if (member, group) not in sources]
        assert len(first) == 1
        crossing = {
            member: source
            for member in here
            if (source := sources.get((member, group))) and host_of[source] != host_of[member]
        }
        outside = sorted(host_of[member] for member in crossing)
        assert outside == sorted({host_of[m] for m in here} - {host_of[first[0]]})
        assert len(set(crossing.values())) <= 1  # the entry
        for member in here:  # back to the trainers in four hops at most
            at, hops = member, 0
            while (source := sources.get((at, group))) is not None:
                at, hops = source, hops + 1
                assert hops <= 3


@given(st.data())
def test_entries_and_ports_follow_their_shares(data: st.DataObject) -> None:
    exchange = data.draw(exchanges(groups=60, ranks=1))
    host_of = dict(zip(exchange.members, exchange.hosts, strict=True))
    passed = dict.fromkeys(exchange.members, 0)
    arrived = dict.fromkeys(exchange.members, sum(exchange.sizes))
    hosts = len(set(exchange.hosts))
    for hop in iter_hops((exchange,), names_of((exchange,))):
        if host_of[hop.sender] == host_of[hop.receiver]:
            arrived[hop.receiver] -= exchange.sizes[hop.received]
        else:
            passed[hop.sender] += exchange.sizes[hop.sent]
    slack = 2 * max(exchange.sizes) * len(exchange.members)
    for k, member in enumerate(exchange.members):
        of_host = sum(
            p for p, host in zip(exchange.ports, exchange.hosts, strict=True) if host == host_of[member]
        )
        assert abs(arrived[member] - sum(exchange.sizes) * exchange.ports[k] / of_host) < slack
        due = sum(exchange.sizes) * (hosts - 1) * exchange.entries[k] / sum(exchange.entries)
        assert abs(passed[member] - due) < slack * hosts


def test_ranks_of_large_engines_have_few_partners() -> None:
    members = tuple(WorkerId("rollout", f"engine-{k:02}", (8,), (r,)) for k in range(16) for r in range(8))
    shares = (1,) * len(members)
    exchange = Exchange(
        members, tuple(m.group for m in members), shares, shares, ((0,),) * len(members), (1,)
    )
    assert {len(partners_of(exchange, member)) for member in members} == {7 + 15}


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_nothing_deadlocks_and_everything_arrives_once(data: st.DataObject) -> None:
    """Without faults trainers send one copy, whatever the rings, the exchanges and the order of events."""
    found = data.draw(several(most=5, groups=9))
    world = RelayWorld(
        found,
        engines := subsets(data.draw, found),
        num_trainers=data.draw(st.integers(1, 3)),
        num_slots=data.draw(st.integers(1, 3)),
        chooser=random.Random(data.draw(st.integers(0, 2**32))),
    )
    world.run()
    for member in world.members.values():
        assert member.drained == list(range(len(member.pieces) // world.num_trainers))
        assert set(member.ring.states) == {"free"} and not member.kept and not member.pending
        assert member.has == dict.fromkeys(member.pieces, 1)
    written = sum(len(trainer.written) for trainer in world.trainers.values())
    sent = sum(len(e.sizes) for e in found if engines.intersection(names_of((e,))))
    assert written == sent * world.num_trainers


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_the_others_have_the_version_when_a_relay_falls_silent_or_gives_up(data: st.DataObject) -> None:
    found = data.draw(several(most=5, groups=7))
    names = names_of(found)
    victim = f"rollout/{data.draw(st.sampled_from(names))}[0]"
    is_silent = data.draw(st.booleans())
    world = RelayWorld(
        found,
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
            assert member.drained == list(range(len(member.pieces) // world.num_trainers)), member.name
            assert set(member.ring.states) == {"free"} and not member.kept


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_no_wrong_byte_of_a_relay_is_applied_unnoticed(data: st.DataObject) -> None:
    """It damages all that it passes on, or what it is not to any more; it may fall silent, so that nobody
    hears of what still lands."""
    found = data.draw(several(most=4, groups=6))
    names = names_of(found)
    victim = f"rollout/{data.draw(st.sampled_from(names))}[0]"
    world = RelayWorld(
        found,
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
            assert member.fate or len(member.drained) == len(member.pieces) // world.num_trainers, member.name
