"""Slots, credits and barriers. `c1` to `c5` are the counterexamples that each rule answers."""

from __future__ import annotations

import time
from typing import Any

import pytest

from wbridge.flow.actions import GiveCredit, GroupReady, ReplaceSlot, TakeBack, ToLeader
from wbridge.flow.barrier import Barrier
from wbridge.flow.messages import Arrived, Landed, Stopped, Vacant
from wbridge.flow.ring import Incoming, ReceiverRing

AB = Incoming(("A", "B"))
A = Incoming(("A",))


def ring(num_slots: int = 2) -> ReceiverRing:
    machine = ReceiverRing(num_slots)
    assert machine.start() == [ToLeader(Vacant(0))]
    return machine


def credits(actions: list[Any]) -> list[tuple[str, int, int, int]]:
    """(writer, group, piece, slot) of each credit."""
    return [(a.writer, a.group, a.piece, a.slot) for a in actions if isinstance(a, GiveCredit)]


def take(machine: ReceiverRing, slot: int, ticket: int) -> list[Any]:
    assert machine.draining(slot, ticket)
    return machine.drained(slot)


def test_one_ticket_through_a_ring_smaller_than_itself() -> None:
    machine = ring()
    assert credits(machine.grant(1, [AB, A, A])) == [("A", 0, 0, 0), ("B", 0, 1, 0), ("A", 1, 0, 1)]
    assert machine.arrived("A", Arrived(1, 0, 0)) == []
    assert machine.arrived("B", Arrived(1, 0, 1)) == [GroupReady(1, 0, 0)]
    assert credits(take(machine, 0, 1)) == [("A", 2, 0, 0)]
    machine.arrived("A", Arrived(1, 1, 0))
    assert machine.arrived("A", Arrived(1, 2, 0)) == [GroupReady(1, 2, 0), ToLeader(Landed(1))]
    assert take(machine, 1, 1) == []
    assert take(machine, 0, 1) == [ToLeader(Vacant(1))]


def test_the_leader_hears_when_a_small_ring_is_full_and_when_all_has_landed() -> None:
    machine = ring()
    machine.grant(1, [A, A, A], before_hold=2)
    assert machine.wants_slots
    assert machine.arrived("A", Arrived(1, 1, 0)) == [GroupReady(1, 1, 1)]
    full = ToLeader(Landed(1, whole=False))
    assert machine.arrived("A", Arrived(1, 0, 0)) == [GroupReady(1, 0, 0), full]
    take(machine, 0, 1)
    assert not machine.wants_slots
    assert machine.arrived("A", Arrived(1, 2, 0)) == [GroupReady(1, 2, 0), ToLeader(Landed(1))]


def test_a_ring_that_holds_all_is_full_when_all_has_landed() -> None:
    machine = ring()
    machine.grant(1, [A, A], before_hold=2)
    machine.arrived("A", Arrived(1, 0, 0))
    assert machine.arrived("A", Arrived(1, 1, 0)) == [GroupReady(1, 1, 1), ToLeader(Landed(1))]


def test_a_divided_ring_is_full_when_no_stage_can_take_more() -> None:
    machine = ReceiverRing({1: 3, 2: 1})
    machine.start()
    machine.grant(1, [A, Incoming(("R",), 2), Incoming(("R",), 2)], before_hold=3)
    machine.arrived("A", Arrived(1, 0, 0))
    assert machine.arrived("R", Arrived(1, 1, 0))[-1] == ToLeader(Landed(1, whole=False))


def test_a_piece_that_is_being_checked_keeps_its_slot() -> None:
    machine = ring(1)
    machine.grant(1, [A])
    assert machine.checking("A", Arrived(1, 0, 0)) == 0
    machine.abort(1)
    machine.stopped("A", Stopped(1))
    assert machine.arrived("A", Arrived(1, 0, 0)) == []
    assert machine.states == ("quarantined",)
    assert machine.checked(0) == [ToLeader(Vacant(1))]


def test_what_is_stale_is_not_checked() -> None:
    machine = ring(1)
    machine.grant(1, [AB, A])
    machine.arrived("A", Arrived(1, 0, 0))
    for stale in (Arrived(1, 0, 0), Arrived(1, 1, 0), Arrived(9, 0, 0), Arrived(1, 0, 7)):
        assert machine.checking("A", stale) is None
    machine.abort(1)
    assert machine.checking("B", Arrived(1, 0, 1)) is None


def test_a_second_arrival_is_checked_until_the_group_is_applied() -> None:
    machine = ring(1)
    machine.grant(1, [A])
    machine.reassign(1, 0, 0, "B")
    machine.arrived("B", Arrived(1, 0, 0))
    assert machine.states == ("ready",)
    assert machine.checking("A", Arrived(1, 0, 0)) == 0
    machine.checked(0)
    assert machine.draining(0, 1)
    assert machine.checking("A", Arrived(1, 0, 0)) is None


def test_a_slot_with_two_writers_of_one_piece_is_known_until_its_next_group() -> None:
    machine = ring(1)
    machine.grant(1, [AB, A])
    machine.arrived("B", Arrived(1, 0, 1))
    assert not machine.is_shared(0)
    machine.reassign(1, 0, 0, "B")
    machine.stopped("A", Stopped(1, 0))  # what it has written stays, and may have come after the bytes of B
    machine.arrived("B", Arrived(1, 0, 0))
    assert machine.is_shared(0)
    take(machine, 0, 1)
    assert machine.states == ("filling",) and not machine.is_shared(0)


def cost_of_arrivals(num_slots: int, num_arrivals: int = 200) -> float:
    """CPU seconds, the least of three runs."""
    costs = []
    for _ in range(3):
        machine = ring(num_slots)
        machine.grant(1, [AB] * num_slots)
        begun_s = time.process_time()
        for group in range(num_arrivals // 2):
            for piece, writer in enumerate("AB"):
                arrived = Arrived(1, group, piece)
                slot = machine.checking(writer, arrived)
                assert slot is not None
                machine.arrived(writer, arrived)
                machine.checked(slot)
        costs.append(time.process_time() - begun_s)
    return min(costs)


def test_arrivals_cost_the_same_however_many_slots_there_are() -> None:
    """Groups that are passed on are small, so a ring that holds a version has thousands."""
    assert cost_of_arrivals(4096) < 5 * cost_of_arrivals(128)


def test_c1_first_credits_come_with_the_grant_also_after_an_abort() -> None:
    machine = ring()
    machine.grant(1, [A, A, A])
    machine.arrived("A", Arrived(1, 0, 0))
    out = machine.abort(1)
    assert machine.states == ("free", "quarantined")
    assert out == [TakeBack(1, 1, ("A",))]
    # the second grant begins at slot 3 mod 2, which has to wait; nothing is credited across tickets
    assert credits(machine.grant(2, [A, A, A])) == []
    assert credits(machine.stopped("A", Stopped(1))) == [("A", 0, 0, 1), ("A", 1, 0, 0)]


def test_c2_the_slot_follows_the_receivers_own_count_of_grants() -> None:
    machine = ring(num_slots=2)
    machine.grant(1, [A, A, A])
    machine.abort(1)
    machine.stopped("A", Stopped(1))
    assert credits(machine.grant(7, [A, A, A])) == [("A", 0, 0, 1), ("A", 1, 0, 0)]


def test_c3_a_slot_with_two_possible_writers_waits_for_both() -> None:
    machine = ring()
    machine.grant(1, [A, A, A, A])
    machine.arrived("A", Arrived(1, 0, 0))
    assert credits(machine.reassign(1, 1, 0, "B")) == [("B", 1, 0, 1)]
    assert machine.arrived("B", Arrived(1, 1, 0)) == [GroupReady(1, 1, 1)]
    take(machine, 0, 1)
    assert take(machine, 1, 1) == [TakeBack(1, 1, ("A",))]
    assert machine.states == ("filling", "quarantined")
    assert credits(machine.stopped("A", Stopped(1, 1))) == [("A", 3, 0, 1)]


def test_c4_a_stop_that_overtakes_the_grant_is_remembered() -> None:
    machine = ring()
    machine.stopped("A", Stopped(1))
    assert credits(machine.grant(1, [AB, A])) == [("B", 0, 1, 0)]
    machine.arrived("B", Arrived(1, 0, 1))
    assert machine.abort(1) == [ToLeader(Vacant(1))]  # nobody may write: nothing to wait for
    assert credits(machine.grant(2, [A, A])) == [("A", 0, 0, 0), ("A", 1, 0, 1)]


def test_c4_a_stop_of_an_earlier_ticket_does_not_stop_this_one() -> None:
    machine = ring()
    machine.grant(1, [A])
    machine.abort(1)
    machine.grant(2, [A])
    assert credits(machine.stopped("A", Stopped(1))) == []
    assert machine.states == ("free", "filling")
    machine.stopped("A", Stopped(1))
    assert machine.arrived("A", Arrived(2, 0, 0)) == [GroupReady(2, 0, 1), ToLeader(Landed(2))]


def test_c5_an_abort_quarantines_what_may_still_be_written() -> None:
    machine = ring()
    machine.grant(1, [AB, A])
    machine.arrived("A", Arrived(1, 0, 0))
    assert machine.abort(1) == [TakeBack(0, 1, ("B",)), TakeBack(1, 1, ("A",))]
    assert machine.arrived("A", Arrived(1, 1, 0)) == []  # written: as good as stopped
    assert machine.states == ("quarantined", "free")
    assert machine.stopped("B", Stopped(1)) == [ToLeader(Vacant(1))]


def test_a_second_a_stale_and_a_foreign_arrival_change_nothing() -> None:
    machine = ring()
    machine.grant(1, [AB, A])
    machine.arrived("A", Arrived(1, 0, 0))
    assert machine.arrived("A", Arrived(1, 0, 0)) == []
    assert machine.arrived("A", Arrived(9, 0, 1)) == []
    assert machine.arrived("A", Arrived(1, 5, 1)) == []
    assert machine.states == ("filling", "filling")


def test_an_abort_voids_only_its_own_ticket() -> None:
    machine = ring()
    machine.grant(2, [A])
    assert machine.abort(1) == []
    assert machine.states == ("filling", "free")


def test_an_abort_does_not_free_a_slot_that_is_being_read() -> None:
    machine = ring()
    machine.grant(1, [A, A])
    machine.arrived("A", Arrived(1, 0, 0))
    machine.arrived("A", Arrived(1, 1, 0))
    assert machine.draining(0, 1)
    machine.abort(1)
    assert machine.states == ("draining", "free")
    assert not machine.draining(1, 1)
    assert machine.drained(0) == [ToLeader(Vacant(1))]


def test_the_transport_can_prove_that_a_writer_stays_away() -> None:
    machine = ring(1)
    machine.grant(1, [A])
    machine.abort(1)
    assert machine.taken_back(0, 7, "A") == []
    assert machine.taken_back(0, 1, "A") == [ToLeader(Vacant(1))]


def test_after_the_fence_the_slot_gets_other_memory() -> None:
    machine = ring(1)
    machine.grant(1, [A])
    machine.abort(1)
    assert machine.abandon(0, 9) == []
    assert machine.abandon(0, 1) == [ReplaceSlot(0)]
    assert machine.states == ("replacing",)
    assert machine.arrived("A", Arrived(1, 0, 0)) == []
    assert machine.replaced(0) == [ToLeader(Vacant(1))]
    assert machine.abandon(0, 1) == []


def test_a_receiver_without_a_part_has_landed_at_once() -> None:
    machine = ring()
    assert machine.grant(1, []) == [ToLeader(Landed(1)), ToLeader(Vacant(1))]


def test_a_receiver_that_takes_versions_parked_says_so_once() -> None:
    machine = ReceiverRing(1, parked=True)
    assert machine.start() == [ToLeader(Vacant(0, parked=True))]
    assert machine.grant(1, []) == [ToLeader(Landed(1))]


def test_a_group_without_pieces_is_ready_at_once() -> None:
    machine = ring(1)
    assert machine.grant(1, [Incoming(())]) == [GroupReady(1, 0, 0), ToLeader(Landed(1))]


def test_groups_of_a_stage_use_its_own_slots() -> None:
    machine = ReceiverRing({1: 1, 2: 1})
    machine.start()
    out = machine.grant(1, [Incoming(("T",), 1), Incoming(("R",), 2), Incoming(("T",), 1)])
    assert credits(out) == [("T", 0, 0, 0), ("R", 1, 0, 1)]
    machine.arrived("T", Arrived(1, 0, 0))
    assert credits(take(machine, 0, 1)) == [("T", 2, 0, 0)]


def test_a_new_epoch_keeps_the_quarantine_and_starts_the_count_again() -> None:
    machine = ring()
    machine.grant(5, [A, A])
    machine.arrived("A", Arrived(5, 0, 0))
    out = machine.renew()
    assert out == [TakeBack(1, 0, ("A",))]
    assert credits(machine.grant(1, [A, A])) == [("A", 0, 0, 0)]
    assert machine.arrived("A", Arrived(5, 1, 0)) == []  # of the old epoch: no proof
    assert machine.states == ("filling", "quarantined")
    assert credits(machine.taken_back(1, 0, "A")) == [("A", 1, 0, 1)]


def test_a_ticket_never_comes_twice() -> None:
    machine = ring()
    machine.grant(2, [A])
    with pytest.raises(AssertionError, match="ticket 2 granted after 2"):
        machine.grant(2, [A])


def test_a_barrier_is_a_set() -> None:
    barrier = Barrier("ab")
    assert barrier.arrive("a")
    assert not barrier.arrive("a")
    assert not barrier.arrive("c")
    assert not barrier.complete
    assert barrier.arrive("b")
    assert barrier.complete
