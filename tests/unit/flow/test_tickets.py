"""The coordinator's rules. `a1` to `a6` are the counterexamples that each rule of ticketing answers."""

from __future__ import annotations

from typing import Any

import pytest

from wbridge.flow.actions import StartCallDeadline, StartDeadline, StartGrace, StartPatience, To
from wbridge.flow.messages import (
    AbortTicket,
    Announced,
    CallAborted,
    EngineOutcome,
    Finished,
    Landed,
    Offer,
    OfferRefused,
    Overdue,
    Report,
    Retired,
    Serve,
    TicketAborted,
    TooLate,
    Waiting,
    WithdrawCall,
    WithdrawOffer,
)
from wbridge.flow.tickets import Tickets


def tickets(
    delivery: Any = "latest",
    *,
    num_ranks: int = 2,
    engines: tuple[str, ...] = ("a", "b"),
    held: bool = False,
    parked: bool = False,
    shares_copies: bool = True,
    num_calls: int = 0,
) -> Tickets:
    return Tickets(
        num_ranks=num_ranks,
        engines=engines,
        delivery=delivery,
        source_held=held,
        lands_when_parked=parked,
        shares_copies=shares_copies,
        num_calls=num_calls,
    )


def announce(machine: Tickets, call: int, *, num_ranks: int = 2, version: int = 0) -> list[Any]:
    """All ranks report the call; what the last report brings about."""
    out: list[Any] = []
    for rank in range(num_ranks):
        out = machine.report(rank, Report(call, version or call))
    return out


def said(actions: list[Any], kind: Any) -> list[Any]:
    return [a.message for a in actions if isinstance(a, To) and isinstance(a.message, kind)]


def outcomes(actions: list[Any]) -> dict[str, tuple[str, bool]]:
    return {m.engine: (m.outcome, m.final) for m in said(actions, EngineOutcome)}


def test_a_ticket_is_announced_when_the_last_rank_has_reported() -> None:
    machine = tickets()
    assert machine.report(0, Report(1, 42, b"meta")) == [StartCallDeadline(1)]
    out = machine.report(1, Report(1, 42))
    everyone = (("rank", 0), ("rank", 1), ("leader", "a"), ("leader", "b"))
    assert out == [To(everyone, Announced(1, 42, 1)), StartPatience(1)]


def test_standing_offers_are_served_with_the_announcement() -> None:
    machine = tickets()
    assert machine.offer("a", Offer(1)) == []
    assert machine.offer("b", Offer(1)) == []
    machine.report(0, Report(1, 42, b"meta"))
    out = machine.report(1, Report(1, 42))
    everyone = (("rank", 0), ("rank", 1), ("leader", "a"), ("leader", "b"))
    assert To(everyone, Serve(1, 42, ("a", "b"), b"meta")) in out


def test_latest_waits_with_patience_then_marks_missed_and_serves_late_offers() -> None:
    machine = tickets()
    machine.offer("a", Offer(1))
    assert not said(announce(machine, 1), Serve)
    out = machine.patience_passed(1)
    assert said(out, Serve) == [Serve(1, 1, ("a",))]
    assert outcomes(out) == {"b": ("missed", False)}
    out = machine.offer("b", Offer(1))
    assert said(out, Serve) == [Serve(1, 1, ("b",))]


def test_who_missed_is_served_first_next_time() -> None:
    machine = tickets()
    machine.offer("a", Offer(1))
    announce(machine, 1)
    machine.patience_passed(1)
    machine.landed("a", Landed(1))
    machine.finished("a", Finished(1, "applied"))
    for rank in range(2):
        machine.waiting(rank, Waiting(2))  # closes the first ticket
    machine.offer("a", Offer(2))
    machine.offer("b", Offer(1))
    assert said(announce(machine, 2), Serve) == [Serve(2, 2, ("b", "a"))]


def one_behind(delivery: Any = "latest", **options: Any) -> tuple[Tickets, list[Any]]:
    """Both have landed ticket 1, `a` has applied it and offers again, and ticket 2 is announced."""
    machine = tickets(delivery, **options)
    for name in "ab":
        machine.offer(name, Offer(1))
    announce(machine, 1)
    for name in "ab":
        machine.landed(name, Landed(1))
    machine.finished("a", Finished(1, "applied"))
    return machine, machine.offer("a", Offer(2)) + announce(machine, 2)


def finish(machine: Tickets, name: str, ticket: int, outcome: Any = "applied") -> list[Any]:
    """The engine is through with a ticket, and stands ready for the next one."""
    machine.landed(name, Landed(ticket))
    machine.finished(name, Finished(ticket, outcome))
    return machine.offer(name, Offer(ticket + 1))


@pytest.mark.parametrize("delivery", ["latest", "every"])
def test_who_is_ready_waits_for_a_neighbour_that_has_an_older_version_to_apply(delivery: str) -> None:
    """Else each of two engines that are never ready in the same instant gets a copy of its own."""
    machine, out = one_behind(delivery)
    assert StartGrace("b", 1) in out and not said(out, Serve)
    assert not said(machine.patience_passed(2), Serve)  # that is for engines that could offer
    (served,) = said(finish(machine, "b", 1), Serve)
    assert sorted(served.engines) == ["a", "b"]
    assert not machine.grace_passed("b", 1)


def test_the_grace_of_an_engine_that_is_still_written_ends_too() -> None:
    machine = tickets()
    for name in "ab":
        machine.offer(name, Offer(1))
    announce(machine, 1)
    assert StartGrace("b", 1) in finish(machine, "a", 1) + announce(machine, 2)
    assert said(machine.grace_passed("b", 1), Serve) == [Serve(2, 2, ("a",))]


def test_who_lets_a_grace_pass_is_not_waited_for_until_it_is_in_time() -> None:
    machine, _ = one_behind()
    assert said(machine.grace_passed("b", 1), Serve) == [Serve(2, 2, ("a",))]
    assert said(finish(machine, "b", 1), Serve) == [Serve(2, 2, ("b",))]
    # Served apart, and ready again after `a`: not waited for, but its grace runs.
    out = finish(machine, "a", 2) + announce(machine, 3)
    assert StartGrace("b", 2) in out
    assert said(out, Serve) == [Serve(3, 3, ("a",))]
    assert said(finish(machine, "b", 2), Serve) == [Serve(3, 3, ("b",))]
    # It was in time, so it is waited for again.
    out = finish(machine, "a", 3) + announce(machine, 4)
    assert StartGrace("b", 3) in out and not said(out, Serve)
    assert said(finish(machine, "b", 3), Serve) == [Serve(4, 4, ("a", "b"))]


def test_a_newer_ticket_does_not_lengthen_the_grace() -> None:
    machine, _ = one_behind()
    out = announce(machine, 3)
    assert not [action for action in out if isinstance(action, StartGrace)] and not said(out, Serve)
    assert said(machine.grace_passed("b", 1), Serve) == [Serve(3, 3, ("a",))]
    assert StartGrace("b", 1) not in finish(machine, "a", 3) + announce(machine, 4)  # it has passed


def test_a_grace_of_an_older_ticket_ends_nothing() -> None:
    machine, _ = one_behind()
    finish(machine, "b", 1)
    out = finish(machine, "a", 2) + announce(machine, 3)
    assert StartGrace("b", 2) in out
    assert machine.grace_passed("b", 1) == []
    assert said(finish(machine, "b", 2), Serve) == [Serve(3, 3, ("a", "b"))]


def test_only_who_applies_a_version_within_a_grace_is_in_time() -> None:
    """An abort lets the engine's leader offer although its application does not poll."""
    machine, _ = one_behind()
    machine.grace_passed("b", 1)
    finish(machine, "b", 1)
    assert StartGrace("b", 2) in finish(machine, "a", 2) + announce(machine, 3)
    finish(machine, "b", 2, "aborted")
    assert said(finish(machine, "a", 3) + announce(machine, 4), Serve) == [Serve(4, 4, ("a",))]


def test_an_engine_whose_grant_is_aborted_in_its_grace_was_late() -> None:
    machine, _ = one_behind()
    machine.finished("b", Finished(1, "aborted"))
    assert said(finish(machine, "b", 1), Serve) == [Serve(2, 2, ("a", "b"))]
    out = finish(machine, "a", 2) + announce(machine, 3)
    assert StartGrace("b", 2) in out and said(out, Serve) == [Serve(3, 3, ("a",))]


def test_engines_that_share_no_copy_do_not_wait_for_each_other() -> None:
    _, out = one_behind(shares_copies=False)
    assert not [action for action in out if isinstance(action, StartGrace)]
    assert said(out, Serve) == [Serve(2, 2, ("a",))]


def test_ranks_that_wait_for_a_snapshot_get_it_while_a_neighbour_is_in_grace() -> None:
    """Served alone, `a` would keep one snapshot and `b`, which is still written, the other one."""
    machine = tickets()
    for name in "ab":
        machine.offer(name, Offer(1))
    announce(machine, 1)
    finish(machine, "a", 1)
    announce(machine, 2)
    machine.waiting(0, Waiting(3))
    out = machine.waiting(1, Waiting(3))
    assert said(out, Retired) == [Retired(2)] and not said(out, Serve)
    announce(machine, 3)
    assert said(finish(machine, "b", 1), Serve) == [Serve(3, 3, ("a", "b"))]


def one_parked() -> Tickets:
    """`a` has parked for ticket 2, while `b` is still written ticket 1; all ranks wait in call 3."""
    machine = tickets(parked=True)
    announce(machine, 1)
    for name in "ab":
        machine.offer(name, Offer(1, parked=True))
    machine.landed("a", Landed(1))
    machine.finished("a", Finished(1, "applied"))
    announce(machine, 2)
    assert StartGrace("b", 1) in machine.offer("a", Offer(2, parked=True))
    machine.waiting(0, Waiting(3))
    out = machine.waiting(1, Waiting(3))
    assert said(out, Retired) == [Retired(2)]
    assert StartPatience(3) in out and not said(out, Serve) and not said(out, OfferRefused)
    return machine


def test_a_parked_engine_lets_its_ticket_go_and_takes_the_next_one() -> None:
    machine = one_parked()
    machine.report(0, Report(3, 3))
    machine.waiting(0, Waiting(4))  # ahead of the other rank
    out = machine.report(1, Report(3, 3))
    assert not said(out, Serve) and not said(out, OfferRefused)
    assert said(machine.grace_passed("b", 1), Serve) == [Serve(3, 3, ("a",))]


def test_a_parked_engine_is_sent_away_when_the_next_ticket_does_not_come() -> None:
    machine = one_parked()
    assert said(machine.withdraw(0, WithdrawCall(3)), OfferRefused)


def test_a_parked_engine_is_sent_away_when_the_next_ticket_takes_too_long() -> None:
    """A rank waits for its training stream before it copies, or hangs."""
    machine = one_parked()
    machine.report(0, Report(3, 3))
    assert not said(machine.patience_passed(2), OfferRefused)
    assert said(machine.patience_passed(3), OfferRefused)
    assert StartPatience(3) in machine.report(1, Report(3, 3))


def test_a_parked_engine_is_sent_away_while_the_next_ticket_has_no_snapshot() -> None:
    """The engine that is still written has all of them."""
    machine = tickets(parked=True)
    announce(machine, 1)
    machine.offer("a", Offer(1, parked=True))
    machine.grace_passed("b", 0)
    assert said(machine.patience_passed(1), Serve)
    machine.waiting(0, Waiting(2))
    machine.waiting(1, Waiting(2))
    assert said(machine.offer("b", Offer(1, parked=True)), OfferRefused)


def test_a_held_source_gives_no_grace() -> None:
    """It waits with patience for all: who is not in the first set gets nothing of this version."""
    machine, out = one_behind(held=True)
    assert not [action for action in out if isinstance(action, StartGrace)]
    assert said(machine.patience_passed(2), Serve) == [Serve(2, 2, ("a",))]


def test_patience_with_an_engine_is_spent_once() -> None:
    machine = tickets()
    machine.offer("a", Offer(1))
    announce(machine, 1)
    machine.patience_passed(1)
    machine.landed("a", Landed(1))
    machine.finished("a", Finished(1, "applied"))
    machine.offer("a", Offer(2))
    out = announce(machine, 2)
    assert said(out, Serve) == [Serve(2, 2, ("a",))]
    assert outcomes(out) == {"b": ("missed", True)}  # of the first ticket
    assert outcomes(machine.patience_passed(2)) == {"b": ("missed", False)}


def test_a_newer_ticket_supersedes_and_inherits_the_patience() -> None:
    """Else a trainer faster than the patience would never be served to an engine beside a silent one."""
    machine = tickets()
    machine.offer("a", Offer(1))
    announce(machine, 1)
    out = announce(machine, 2)
    assert StartPatience(2) not in out
    assert outcomes(out) == {"a": ("superseded", True), "b": ("superseded", True)}
    assert said(out, Retired) == [Retired(1)]
    assert said(machine.patience_passed(1), Serve) == [Serve(2, 2, ("a",))]


def test_a1_landing_frees_the_source_although_the_engine_never_polls() -> None:
    machine = tickets()
    machine.offer("a", Offer(1))
    machine.offer("b", Offer(1))
    announce(machine, 1)
    announce(machine, 2)
    assert not said(machine.landed("a", Landed(1)), Retired)
    assert said(machine.landed("b", Landed(1)), Retired) == [Retired(1)]


def test_a2_all_ranks_waiting_closes_the_newest_ticket() -> None:
    machine = tickets()
    announce(machine, 1)
    assert machine.waiting(0, Waiting(2)) == [StartCallDeadline(2)]
    out = machine.waiting(1, Waiting(2))
    assert said(out, Retired) == [Retired(1)]
    assert outcomes(out) == {"a": ("superseded", True), "b": ("superseded", True)}


def test_a2_an_engine_that_stands_ready_is_served_before_the_ticket_closes() -> None:
    machine = tickets()
    machine.offer("a", Offer(1))
    announce(machine, 1)
    machine.waiting(0, Waiting(2))
    out = machine.waiting(1, Waiting(2))
    assert said(out, Serve) == [Serve(1, 1, ("a",))]
    assert not said(out, Retired)
    assert said(machine.landed("a", Landed(1)), Retired) == [Retired(1)]


def test_a3_every_does_not_skip() -> None:
    machine = tickets("every")
    announce(machine, 1)
    announce(machine, 2)
    for name in "ab":
        out = machine.offer(name, Offer(1))
    assert said(out, Serve) == [Serve(1, 1, ("a", "b"))]
    machine.landed("a", Landed(1))
    assert said(machine.landed("b", Landed(1)), Retired) == [Retired(1)]


def test_a4_a_withdrawn_number_is_burnt_and_calls_match_by_number() -> None:
    machine = tickets()
    machine.report(0, Report(1, 7))
    out = machine.withdraw(1, WithdrawCall(1))
    burnt = CallAborted(1, "trainer rank 1 cancelled send 1")
    assert out == [To((("rank", 0), ("rank", 1)), burnt)]
    assert machine.report(1, Report(2, 7)) == [StartCallDeadline(2)]  # not a match for rank 0's first call
    assert said(machine.report(0, Report(2, 7)), Announced) == [Announced(1, 7, 2)]


def test_a4_who_begins_a_burnt_call_later_is_told_once() -> None:
    machine = tickets()
    machine.withdraw(1, WithdrawCall(1))
    burnt = CallAborted(1, "trainer rank 1 cancelled send 1")
    assert machine.waiting(0, Waiting(1)) == [To((("rank", 0),), burnt)]
    assert machine.report(0, Report(1, 7)) == []


def test_a5_direct_cancelled_after_the_announcement_aborts() -> None:
    machine = tickets("every", held=True)
    machine.offer("a", Offer(1))
    machine.offer("b", Offer(1))
    announce(machine, 1)
    machine.landed("a", Landed(1))
    out = machine.withdraw(1, WithdrawCall(1))
    (aborted,) = said(out, TicketAborted)
    assert aborted == TicketAborted(1, ("a", "b"), "trainer rank 1 cancelled send 1", everywhere=True)
    assert said(out, Retired) == [Retired(1)]
    assert outcomes(machine.finished("a", Finished(1, "applied"))) == {"a": ("applied", True)}  # it lost
    assert outcomes(machine.finished("b", Finished(1, "aborted"))) == {"b": ("aborted", True)}
    assert machine.quiet


def test_pinned_cancelled_after_the_announcement_only_stops_waiting() -> None:
    machine = tickets()
    announce(machine, 1)
    assert machine.withdraw(1, WithdrawCall(1)) == [To((("rank", 1),), TooLate(1, 1))]


def test_a6_a_withdrawal_reaches_a_rank_that_waits_for_a_snapshot() -> None:
    machine = tickets()
    announce(machine, 1)
    machine.waiting(1, Waiting(2))
    (action,) = machine.withdraw(0, WithdrawCall(2))
    assert isinstance(action, To)
    assert action.recipients == (("rank", 0), ("rank", 1))
    assert machine.waiting(0, Waiting(3)) == [StartCallDeadline(3)]  # rank 1 waits no more: nothing closes


def test_a_call_that_a_rank_never_makes_ends_for_all_and_the_next_goes_on() -> None:
    machine = tickets(num_ranks=3)
    assert machine.report(0, Report(1, 5)) == [StartCallDeadline(1)]
    assert machine.waiting(1, Waiting(1)) == []
    assert machine.waits()[0] == [(2, 1)]
    (burnt,) = machine.call_deadline_passed(1)
    assert burnt.recipients == (("rank", 0), ("rank", 1))
    assert burnt.message.missing == ("trainer rank 2",)
    assert "trainer rank 2 did not make send 1 within update_timeout_s" in burnt.message.reason
    assert machine.report(0, Report(2, 6)) == [StartCallDeadline(2)]
    assert machine.report(2, Report(1, 5)) == [To((("rank", 2),), burnt.message)]
    assert machine.call_deadline_passed(1) == []
    machine.report(1, Report(2, 6))
    assert said(machine.report(2, Report(2, 6)), Announced) == [Announced(1, 6, 2)]
    assert machine.call_deadline_passed(2) == []


def test_a_call_that_all_have_begun_is_not_burnt_while_one_waits_for_a_snapshot() -> None:
    machine = tickets()
    machine.report(0, Report(1, 5))
    machine.waiting(1, Waiting(1))
    assert machine.call_deadline_passed(1) == []
    assert said(machine.report(1, Report(1, 5)), Announced) == [Announced(1, 5, 1)]


def test_a_single_rank_waits_for_nobody() -> None:
    machine = tickets(num_ranks=1)
    assert machine.waiting(0, Waiting(1)) == []
    assert said(machine.report(0, Report(1, 5)), Announced)


def test_differing_versions_are_named_and_the_next_call_goes_on() -> None:
    machine = tickets()
    machine.report(0, Report(1, 5))
    out = machine.report(1, Report(1, 6))
    (answer,) = said(out, CallAborted)
    assert answer.protocol_error
    assert "rank 0 sends version 5" in answer.reason
    assert "rank 1 sends version 6" in answer.reason
    assert said(announce(machine, 2), Announced) == [Announced(1, 2, 2)]


def test_differing_metadata_is_named() -> None:
    machine = tickets()
    machine.report(0, Report(1, 5, b"12"))
    (answer,) = said(machine.report(1, Report(1, 5, b"123")), CallAborted)
    assert answer.protocol_error
    assert "rank 1 gives 3 bytes" in answer.reason


def test_an_engine_has_one_grant_at_most() -> None:
    machine = tickets()
    machine.offer("a", Offer(1))
    announce(machine, 1)
    machine.patience_passed(1)
    machine.landed("a", Landed(1))
    assert said(machine.offer("a", Offer(2)), OfferRefused) == [
        OfferRefused(2, "engine 'a' still holds ticket 1")
    ]


def test_a_parked_offer_with_nothing_open_is_refused_at_once() -> None:
    machine = tickets(parked=True)
    assert said(machine.offer("a", Offer(1, parked=True)), OfferRefused)
    announce(machine, 1)
    assert machine.offer("a", Offer(2, parked=True)) == [StartGrace("b", 0)]
    assert said(machine.offer("b", Offer(1)), Serve) == [Serve(1, 1, ("a", "b"))]


def test_parked_the_first_offer_after_patience_waits_for_a_step_of_the_others_then_they_missed_it() -> None:
    """They make steps that take longer than patience, or a version does: it began long before they could."""
    machine = tickets(parked=True)
    announce(machine, 1)
    assert machine.patience_passed(1) == []
    assert machine.offer("b", Offer(1)) == [StartGrace("a", 0)]
    out = machine.grace_passed("a", 0)
    assert said(out, Serve) == [Serve(1, 1, ("b",))]
    assert outcomes(out) == {"a": ("missed", False)}


def test_parked_engines_whose_patience_has_passed_share_a_copy() -> None:
    machine = tickets(parked=True)
    announce(machine, 1)
    machine.patience_passed(1)
    machine.offer("b", Offer(1, parked=True))
    (served,) = said(machine.offer("a", Offer(1, parked=True)), Serve)
    assert sorted(served.engines) == ["a", "b"]


def test_parked_offers_are_refused_when_their_ticket_is_aborted() -> None:
    machine = tickets("every", parked=True, held=True)
    announce(machine, 1)
    machine.offer("a", Offer(1, parked=True))
    out = machine.withdraw(0, WithdrawCall(1))
    assert [m.offer for m in said(out, OfferRefused)] == [1]
    assert outcomes(out) == {"a": ("aborted", True), "b": ("aborted", True)}


def test_an_offer_of_an_engine_that_is_not_parked_stands_until_a_ticket_comes() -> None:
    machine = tickets("every", parked=True, held=True, engines=("a",))
    assert machine.offer("a", Offer(1)) == []
    assert said(announce(machine, 1), Serve) == [Serve(1, 1, ("a",))]


def test_an_offer_taken_back_is_answered_unless_it_was_served() -> None:
    machine = tickets()
    machine.offer("a", Offer(1))
    assert said(machine.withdraw_offer("a", WithdrawOffer(1)), OfferRefused)
    machine.offer("a", Offer(2))
    announce(machine, 1)
    machine.patience_passed(1)
    assert machine.withdraw_offer("a", WithdrawOffer(2)) == []


def test_independence_with_a_held_source_nobody_there_is_missed_after_patience() -> None:
    machine = tickets(held=True)
    announce(machine, 1)
    out = machine.patience_passed(1)
    assert said(out, Retired) == [Retired(1)]
    assert outcomes(out) == {"a": ("missed", True), "b": ("missed", True)}


def test_every_drops_at_the_deadline_who_has_not_landed() -> None:
    machine = tickets("every")
    out = announce(machine, 1)
    assert StartDeadline(1) in out
    machine.offer("a", Offer(1))
    machine.patience_passed(1)
    machine.landed("a", Landed(1))
    out = machine.update_deadline_passed(1)
    (overdue,) = said(out, Overdue)
    assert overdue.missing == ("b",)
    assert "engines b" in overdue.reason
    assert outcomes(out) == {"b": ("missed", True)}
    assert said(out, Retired) == [Retired(1)]


def test_the_deadline_voids_grants_that_have_not_landed() -> None:
    machine = tickets("every")
    machine.offer("a", Offer(1))
    machine.offer("b", Offer(1))
    announce(machine, 1)
    machine.landed("a", Landed(1))
    out = machine.update_deadline_passed(1)
    (aborted,) = said(out, TicketAborted)
    assert aborted.engines == ("b",)
    assert not aborted.everywhere
    assert said(out, Retired) == [Retired(1)]
    assert machine.landed("b", Landed(1)) == []  # too late
    assert outcomes(machine.finished("b", Finished(1, "aborted"))) == {"b": ("aborted", True)}


@pytest.mark.parametrize("outcome", ["aborted", "tainted"])
def test_every_does_not_wait_for_an_engine_that_gave_a_ticket_up(outcome: Any) -> None:
    """Its writers must stop and say so; the same ticket is never granted to it twice."""
    machine = tickets("every")
    machine.offer("a", Offer(1))
    machine.offer("b", Offer(1))
    announce(machine, 1)
    machine.landed("a", Landed(1))
    out = machine.finished("b", Finished(1, outcome, "checksum"))
    (stop,) = said(out, TicketAborted)
    assert stop.engines == ("b",)
    assert outcomes(out) == {"b": (outcome, True)}
    assert said(out, Retired) == [Retired(1)]
    assert machine.offer("b", Offer(2)) == []
    assert not said(machine.patience_passed(1), Serve)


def test_abort_ends_landed_grants_too() -> None:
    machine = tickets()
    machine.offer("a", Offer(1))
    machine.offer("b", Offer(1))
    announce(machine, 1)
    machine.landed("a", Landed(1))
    out = machine.abort(0, AbortTicket(1, "loss is nan"))
    (aborted,) = said(out, TicketAborted)
    assert aborted.engines == ("a", "b")
    assert aborted.everywhere
    assert "loss is nan" in aborted.reason
    assert said(out, Retired) == [Retired(1)]
    assert not machine.quiet


def test_a_lost_engine_is_waited_for_by_nobody() -> None:
    machine = tickets("every")
    machine.offer("a", Offer(1))
    announce(machine, 1)
    out = machine.lose_engine("b", "killed")
    assert outcomes(out) == {"b": ("lost", True)}
    assert said(out, Serve) == [Serve(1, 1, ("a",))]
    assert said(machine.landed("a", Landed(1)), Retired) == [Retired(1)]
    assert outcomes(announce(machine, 2)) == {"b": ("lost", True)}


def test_the_grant_of_a_lost_engine_is_void() -> None:
    machine = tickets()
    machine.offer("b", Offer(1))
    announce(machine, 1)
    machine.patience_passed(1)
    out = machine.lose_engine("b")
    (aborted,) = said(out, TicketAborted)
    assert aborted.engines == ("b",)
    assert machine.quiet
    assert machine.finished("b", Finished(1, "applied")) == []


def test_a_lost_rank_ends_what_has_not_landed_and_every_later_call() -> None:
    machine = tickets()
    machine.offer("a", Offer(1))
    machine.offer("b", Offer(1))
    announce(machine, 1)
    machine.landed("a", Landed(1))
    machine.report(0, Report(2, 2))
    out = machine.lose_rank(1, "killed")
    (aborted,) = said(out, TicketAborted)
    assert aborted.engines == ("b",)
    assert said(out, CallAborted) == [CallAborted(2, "trainer rank 1 is lost: killed")]
    assert all(("rank", 1) not in a.recipients for a in out if isinstance(a, To))
    assert said(machine.report(0, Report(3, 3)), CallAborted)
    assert outcomes(machine.finished("a", Finished(1, "applied"))) == {"a": ("applied", True)}


def test_the_end_of_an_epoch_lets_open_grants_finish() -> None:
    machine = tickets()
    machine.offer("a", Offer(1))
    announce(machine, 1)
    machine.patience_passed(1)
    machine.report(0, Report(2, 2))
    out = machine.end("an engine joins")
    assert said(out, CallAborted) == [CallAborted(2, "an engine joins")]
    assert outcomes(out) == {"b": ("missed", True)}
    assert said(machine.offer("b", Offer(1)), OfferRefused) == [OfferRefused(1, "an engine joins")]
    assert not machine.quiet
    assert said(machine.landed("a", Landed(1)), Retired) == [Retired(1)]
    machine.finished("a", Finished(1, "applied"))
    assert machine.quiet
    assert machine.next_ticket == 2


def test_the_same_version_may_be_sent_again() -> None:
    machine = tickets()
    announce(machine, 1, version=9)
    assert said(announce(machine, 2, version=9), Announced) == [Announced(2, 9, 2)]


def test_a_send_that_another_rank_began_in_an_earlier_epoch_is_burnt() -> None:
    machine = tickets(num_calls=3)
    out = machine.report(1, Report(3, 30))
    assert [answer.call for answer in said(out, CallAborted)] == [3]
    assert not said(machine.report(1, Report(3, 30)), CallAborted)
    assert said(announce(machine, 4, version=40), Announced) == [Announced(1, 40, 4)]


def test_a_rank_waits_in_its_next_send_while_it_copies_for_the_last_one() -> None:
    machine = tickets()
    for rank in range(2):
        machine.waiting(rank, Waiting(2))
    out = announce(machine, 1)
    assert said(out, Retired) == [Retired(1)]


def test_a_rank_that_repeats_a_version_in_a_later_epoch_is_told_to_go_on() -> None:
    machine = tickets(num_calls=3)
    machine.report(0, Report(4, 40))
    machine.report(1, Report(5, 40))  # the snapshot of its next call is there first
    machine.waiting(1, Waiting(6))
    out = machine.report(1, Report(4, 30))
    first = (("rank", 0), ("leader", "a"), ("leader", "b"))
    assert [a for a in out if isinstance(a, To)] == [
        To((("rank", 1),), said(out, CallAborted)[0]),
        To(first, Announced(1, 40, 4)),
        To((("rank", 1),), Announced(1, 40, 5)),
    ]
    assert said(out, CallAborted)[0].call == 4
    assert machine.waits() == ([(0, 5)], [])
    assert machine.withdraw(1, WithdrawCall(4)) == []
    assert said(machine.withdraw(1, WithdrawCall(5)), TooLate) == [TooLate(5, 1)]
    machine.report(0, Report(5, 50))
    assert said(machine.report(1, Report(6, 50)), Announced) == [Announced(2, 50, 5), Announced(2, 50, 6)]


def test_ranks_that_disagree_from_the_beginning_are_told_so() -> None:
    machine = tickets()
    machine.report(0, Report(1, 2))
    (answer,) = said(machine.report(1, Report(1, 1)), CallAborted)
    assert answer.protocol_error
    machine = tickets(num_calls=3)
    announce(machine, 4)
    machine.report(0, Report(5, 2))
    (answer,) = said(machine.report(1, Report(5, 1)), CallAborted)
    assert answer.protocol_error
