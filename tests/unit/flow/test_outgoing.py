"""The writer's side of credits, stops and sources."""

from __future__ import annotations

from wbridge.flow.actions import CancelPut, Flush, FreeSource, SendStopped, StartPut
from wbridge.flow.outgoing import Outgoing


def granted(*pieces: tuple[int, int]) -> Outgoing:
    machine = Outgoing()
    machine.announced(1)
    machine.serve(1, {"r": pieces})
    return machine


def test_a_put_needs_a_grant_and_a_credit() -> None:
    machine = granted((0, 0))
    assert machine.credit("r", 1, 0, 0) == [StartPut("r", 1, 0, 0)]


def test_a_credit_may_overtake_its_grant_and_its_announcement() -> None:
    machine = Outgoing()
    assert machine.credit("r", 2, 0, 0) == []
    assert machine.credit("q", 1, 0, 0) == []
    machine.announced(1)
    machine.announced(2)
    assert machine.serve(2, {"r": [(0, 0)]}) == [StartPut("r", 2, 0, 0)]
    assert machine.serve(1, {"q": [(0, 0)]}) == [StartPut("q", 1, 0, 0)]


def test_a_second_credit_for_one_piece_starts_nothing() -> None:
    machine = granted((0, 0))
    machine.credit("r", 1, 0, 0)
    assert machine.credit("r", 1, 0, 0) == []
    machine.put_ended("r", 1, 0, 0)
    assert machine.credit("r", 1, 0, 0) == []


def test_an_abort_voids_only_its_own_tickets_credits() -> None:
    machine = granted((0, 0))
    machine.credit("r", 2, 0, 0)  # of the next ticket, early
    assert machine.aborted(1, ["r"]) == [Flush("r", 1, -1)]
    assert machine.credit("r", 1, 0, 0) == []
    machine.announced(2)
    assert machine.serve(2, {"r": [(0, 0)]}) == [StartPut("r", 2, 0, 0)]


def test_stopped_is_said_after_the_flush_also_if_nothing_was_written() -> None:
    machine = granted((0, 0))
    assert machine.aborted(1, ["r"]) == [Flush("r", 1, -1)]
    assert machine.flushed("r", 1, -1) == [SendStopped("r", 1, -1)]


def test_a_flying_put_is_cancelled_and_awaited_before_the_flush() -> None:
    machine = granted((0, 0), (1, 0))
    machine.credit("r", 1, 0, 0)
    assert machine.aborted(1, ["r"]) == [CancelPut("r", 1, 0, 0)]
    assert machine.retired(1) == []
    assert machine.put_ended("r", 1, 0, 0) == [Flush("r", 1, -1)]
    assert machine.flushed("r", 1, -1) == [SendStopped("r", 1, -1), FreeSource(1)]


def test_a_source_is_free_when_retired_and_our_own_puts_are_over() -> None:
    machine = granted((0, 0))
    machine.credit("r", 1, 0, 0)
    assert machine.retired(1) == []
    assert machine.put_ended("r", 1, 0, 0) == [FreeSource(1)]
    assert machine.credit("r", 1, 0, 0) == [SendStopped("r", 1, 0)]


def test_an_abort_of_one_receiver_leaves_the_others() -> None:
    machine = Outgoing()
    machine.announced(1)
    machine.serve(1, {"r": [(0, 0)], "q": [(0, 0)]})
    machine.aborted(1, ["r"])
    assert machine.credit("q", 1, 0, 0) == [StartPut("q", 1, 0, 0)]


def test_a_further_serving_set_adds_receivers() -> None:
    machine = granted((0, 0))
    assert machine.credit("q", 1, 3, 0) == []
    assert machine.serve(1, {"q": [(3, 0)]}) == [StartPut("q", 1, 3, 0)]


def test_a_lost_receiver_is_owed_nothing() -> None:
    machine = granted((0, 0), (1, 0))
    machine.credit("r", 1, 0, 0)
    machine.aborted(1, ["r"])
    assert machine.receiver_lost("r") == []
    machine.retired(1)
    assert machine.put_ended("r", 1, 0, 0) == [FreeSource(1)]


def test_c3_a_lost_range_is_stopped_at_once_for_its_group() -> None:
    machine = granted((1, 0), (3, 0))
    assert machine.give_up("r", 1, 1, 0) == [Flush("r", 1, 1)]
    assert machine.flushed("r", 1, 1) == [SendStopped("r", 1, 1)]
    assert machine.credit("r", 1, 1, 0) == []
    assert machine.credit("r", 1, 3, 0) == [StartPut("r", 1, 3, 0)]


def test_a_range_taken_over_may_have_its_credit_already() -> None:
    machine = granted((0, 0))
    assert machine.credit("r", 1, 1, 0) == []
    assert machine.take_over("r", 1, 1, 0) == [StartPut("r", 1, 1, 0)]


def test_retired_with_a_piece_never_credited_says_stopped() -> None:
    """The receiver may have credited us for a range that then came from elsewhere."""
    machine = granted((0, 0))
    assert machine.retired(1) == [Flush("r", 1, -1)]
    assert machine.flushed("r", 1, -1) == [SendStopped("r", 1, -1), FreeSource(1)]
