"""Long random runs of jobs too large to explore: adversarial delivery, skew, faults, and then a good end."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.property.explorer import walk
from tests.property.lockstep_model import LockstepWorld
from tests.property.loss_model import LossWorld
from tests.property.ring_model import RingWorld
from tests.property.test_flow_lockstep import AbortsCommitted, NeverInDoubt
from tests.property.test_flow_rings import NoFence
from tests.property.ticket_model import TicketWorld

seeds = st.integers(0, 2**32)


def run(world: Any, seed: int, num_steps: int) -> None:
    walk(world, random.Random(seed).randrange, num_steps=num_steps)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("depends", ["tp", "pp", "free"])
@settings(max_examples=8)
@given(seed=seeds, faults=st.integers(0, 2))
def test_eight_workers_apply_at_one_poll_index_or_none(
    depends: str, direct: bool, seed: int, faults: int
) -> None:
    world = LockstepWorld(
        depends=depends,
        direct=direct,
        num_workers=8,
        num_tickets=3,
        timeouts=faults,
        refusals=faults,
        cancels=faults,
        aborts=faults // 2,
        slow_apply=True,
    )
    run(world, seed, 300)


small_rings = st.sets(st.integers(0, 7), min_size=1).map(lambda workers: tuple(sorted(workers)))


@pytest.mark.parametrize("depends", ["tp", "pp", "free"])
@settings(max_examples=8)
@given(seed=seeds, small=small_rings, faults=st.integers(0, 2))
def test_eight_workers_some_with_small_rings(
    depends: str, seed: int, small: tuple[int, ...], faults: int
) -> None:
    world = LockstepWorld(
        depends=depends,
        small=small,
        num_workers=8,
        num_tickets=3,
        timeouts=faults,
        refusals=faults,
        cancels=faults,
        aborts=faults // 2,
        failures=faults // 2,
    )
    run(world, seed, 300)


@pytest.mark.parametrize("leader_dies", [False, True])
@settings(max_examples=10)
@given(
    seed=seeds,
    depends=st.sampled_from(["tp", "pp", "free"]),
    rings=st.sampled_from(["pinned", "direct", "small"]),
)
def test_eight_workers_and_a_death(leader_dies: bool, seed: int, depends: str, rings: str) -> None:
    world = LockstepWorld(
        depends=depends,
        direct=rings == "direct",
        small=(1, 5) if rings == "small" else (),
        num_workers=8,
        num_tickets=2,
        deaths=1,
        leader_dies=leader_dies,
    )
    run(world, seed, 300)


@settings(max_examples=100)
@given(
    seed=seeds,
    num_slots=st.integers(1, 5),
    num_groups=st.integers(1, 4),
    aborts=st.integers(0, 1),
    fault=st.sampled_from(["", "fences", "deaths", "epochs"]),
    checks=st.booleans(),
)
def test_a_slot_is_never_given_out_while_busy(
    seed: int, num_slots: int, num_groups: int, aborts: int, fault: str, checks: bool
) -> None:
    faults = {fault: 1} if fault else {}
    world = RingWorld(num_slots=num_slots, num_groups=num_groups, aborts=aborts, checks=checks, **faults)
    run(world, seed, 40)


@settings(max_examples=100)
@given(seed=seeds, num_slots=st.integers(1, 5), num_groups=st.integers(2, 4), aborts=st.integers(0, 1))
def test_a_slot_with_two_writers_is_never_given_out_while_busy(
    seed: int, num_slots: int, num_groups: int, aborts: int
) -> None:
    run(RingWorld(num_slots=num_slots, num_groups=num_groups, aborts=aborts, moves=1), seed, 40)


@pytest.mark.parametrize("delivery", ["every", "latest"])
@settings(max_examples=40)
@given(
    seed=seeds,
    num_snapshots=st.integers(1, 3),
    receiver_direct=st.booleans(),
    faults=st.fixed_dictionaries(
        {name: st.integers(0, 1) for name in ("cancels", "engine_losses", "deadlines")}
    ),
)
def test_tickets_of_a_pinned_sender(
    delivery: str, seed: int, num_snapshots: int, receiver_direct: bool, faults: dict[str, int]
) -> None:
    world = TicketWorld(
        delivery=delivery,
        num_ranks=3,
        num_engines=3,
        num_versions=4,
        num_snapshots=num_snapshots,
        receiver_direct=receiver_direct,
        slow_engines=True,
        **faults,
    )
    run(world, seed, 120)


@pytest.mark.parametrize("delivery", ["every", "latest"])
@settings(max_examples=40)
@given(
    seed=seeds,
    receiver_direct=st.booleans(),
    faults=st.fixed_dictionaries(
        {name: st.integers(0, 1) for name in ("cancels", "engine_losses", "deadlines")}
    ),
)
def test_tickets_of_a_direct_sender(
    delivery: str, seed: int, receiver_direct: bool, faults: dict[str, int]
) -> None:
    world = TicketWorld(
        delivery=delivery,
        num_ranks=3,
        num_engines=3,
        num_versions=4,
        sender_direct=True,
        receiver_direct=receiver_direct,
        slow_engines=True,
        **faults,
    )
    run(world, seed, 120)


@settings(max_examples=60)
@given(seed=seeds, rings=st.sampled_from(["pinned", "direct", "small"]), restart=st.booleans())
def test_the_coordinator_is_lost_and_perhaps_comes_back(seed: int, rings: str, restart: bool) -> None:
    small = (0, 3) if rings == "small" else ()
    world = LossWorld(depends="pp", num_workers=4, direct=rings == "direct", small=small, restart=restart)
    run(world, seed, 80)


@pytest.mark.parametrize(
    "broken",
    [
        lambda: RingWorld(aborts=1, ring=NoFence),
        lambda: LockstepWorld(
            depends="free", num_workers=8, deaths=1, leader_dies=True, follower=NeverInDoubt
        ),
        lambda: LockstepWorld(
            depends="free", num_workers=8, aborts=1, slow_apply=True, leader=AbortsCommitted
        ),
    ],
    ids=["no fence", "never in doubt", "aborts what is committed"],
)
def test_random_runs_notice_a_missing_rule(broken: Any) -> None:
    with pytest.raises(AssertionError, match=r"late write|fails clean|after its commit"):
        for seed in range(100):
            run(broken(), seed, 300)
