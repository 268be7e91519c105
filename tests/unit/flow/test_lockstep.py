"""Leader and follower. `b1`-`b4`, `e1`-`e3` and `s1`-`s3` are the counterexamples that each rule answers."""

from __future__ import annotations

from typing import Any

import pytest

from wbridge.flow.actions import (
    Apply,
    EngineBroken,
    Leave,
    PollFails,
    RunBeforeApply,
    Separated,
    StartGrantTimer,
    StartHoldTimer,
    ToCoordinator,
    ToLeader,
    ToWorkers,
    Unpark,
)
from wbridge.flow.follower import Follower
from wbridge.flow.leader import Leader
from wbridge.flow.messages import (
    Announced,
    Commit,
    Done,
    Finished,
    Hold,
    Landed,
    Meet,
    Offer,
    OfferRefused,
    Promise,
    Ready,
    Refuse,
    Release,
    Serve,
    TicketAborted,
    Vacant,
    WithdrawHold,
    WithdrawOffer,
    WorkerApplied,
)

SERVE = Serve(1, 42, ("e",))


def pinned() -> Leader:
    """A leader of two workers that has offered."""
    leader = Leader(2, lands_when_parked=False, max_poll_skew=4)
    assert leader.vacant(0, Vacant(0)) == []
    assert leader.vacant(1, Vacant(0)) == [ToCoordinator(Offer(1))]
    return leader


def landed() -> Leader:
    """... and holds its workers, as ticket 1 has landed."""
    leader = pinned()
    assert leader.serve(SERVE) == [ToWorkers(SERVE)]
    assert leader.landed(0, Landed(1)) == []
    assert leader.landed(1, Landed(1)) == [ToCoordinator(Landed(1)), ToWorkers(Hold(1))]
    return leader


def met(leader: Leader, hold: int = 1) -> Leader:
    leader.promise(0, Promise(hold, 5))
    assert leader.promise(1, Promise(hold, 6)) == [ToWorkers(Meet(hold, 6))]
    return leader


def committed() -> Leader:
    leader = met(landed())
    leader.ready(0, Ready(1))
    assert leader.ready(1, Ready(1)) == [ToWorkers(Commit(1, 1, 42))]
    return leader


def direct() -> Leader:
    """A leader of two workers that stand ready and have offered."""
    leader = Leader(2, lands_when_parked=True, max_poll_skew=4)
    assert leader.announced(Announced(1, 42, 1)) == []  # how the workers take versions is not known yet
    assert leader.vacant(0, Vacant(0)) == []
    assert leader.vacant(1, Vacant(0, parked=True)) == [ToWorkers(Hold(1))]
    met(leader)
    leader.ready(0, Ready(1))
    assert leader.ready(1, Ready(1)) == [ToCoordinator(Offer(1, parked=True))]
    return leader


def released(actions: list[Any]) -> Release:
    (release,) = [a.message for a in actions if isinstance(a, ToWorkers) and isinstance(a.message, Release)]
    return release


def test_pinned_one_update_from_offer_to_done() -> None:
    leader = committed()
    assert leader.applied(0, WorkerApplied(1, "applied")) == []
    assert leader.applied(1, WorkerApplied(1, "applied")) == [
        ToWorkers(Done(1, "applied")),
        ToCoordinator(Finished(1, "applied")),
    ]
    leader.vacant(0, Vacant(1))
    assert leader.vacant(1, Vacant(1)) == [ToCoordinator(Offer(2))]


def test_a_vacancy_of_an_earlier_grant_is_no_offer() -> None:
    leader = committed()
    leader.vacant(0, Vacant(1))  # its ring had no part in the ticket
    leader.applied(0, WorkerApplied(1, "applied"))
    leader.applied(1, WorkerApplied(1, "applied"))
    assert leader.vacant(1, Vacant(0)) == []
    assert leader.vacant(1, Vacant(1)) == [ToCoordinator(Offer(2))]


def test_direct_the_grant_is_the_commit() -> None:
    leader = direct()
    assert leader.serve(SERVE) == [ToWorkers(SERVE), ToWorkers(Commit(1, 1, 42))]
    leader.landed(0, Landed(1))
    assert leader.landed(1, Landed(1)) == [ToCoordinator(Landed(1))]


def test_direct_a_version_that_waits_in_the_slots_lands_when_the_workers_stand() -> None:
    leader = Leader(2, lands_when_parked=True, max_poll_skew=4)
    leader.vacant(0, Vacant(0))
    assert leader.vacant(1, Vacant(0)) == [ToCoordinator(Offer(1))]  # before there is a ticket
    assert leader.announced(Announced(1, 42, 1)) == []
    leader.serve(SERVE)
    leader.landed(0, Landed(1))
    assert leader.landed(1, Landed(1)) == [ToWorkers(Hold(1))]
    met(leader)
    leader.ready(0, Ready(1))
    assert leader.ready(1, Ready(1)) == [ToWorkers(Commit(1, 1, 42)), ToCoordinator(Landed(1))]


def test_direct_a_refusal_lets_the_workers_go_until_the_next_ticket() -> None:
    leader = direct()
    out = leader.refused(OfferRefused(1, "no open ticket"))
    assert out == [ToWorkers(Release(1, "no open ticket"))]
    assert leader.announced(Announced(2, 43, 2)) == [ToWorkers(Hold(2))]


def test_direct_a_withdrawal_waits_for_the_answer_to_the_offer() -> None:
    leader = direct()
    assert leader.withdraw(1, WithdrawHold(1, "cancelled")) == [ToCoordinator(WithdrawOffer(1))]
    out = leader.refused(OfferRefused(1, "taken back"))
    assert released(out).reason == "worker 1: cancelled"
    assert ToWorkers(Hold(2)) in out  # the ticket is still there


def test_direct_a_grant_that_crosses_the_withdrawal_wins() -> None:
    leader = direct()
    leader.withdraw(1, WithdrawHold(1, "cancelled"))
    assert ToWorkers(Commit(1, 1, 42)) in leader.serve(SERVE)


def test_a_grant_nobody_waits_for_is_answered() -> None:
    leader = Leader(1, lands_when_parked=True, max_poll_skew=4)
    (answer,) = leader.serve(SERVE)
    assert answer == ToCoordinator(Finished(1, "aborted", "the engine is not waiting for a grant"))


def test_b1_a_worker_promises_at_once_whatever_its_caller_does() -> None:
    follower = Follower()
    follower.counter = 4
    assert follower.message(Hold(1)) == [ToLeader(Promise(1, 5))]
    follower.counter = 5
    assert follower.poll() == [StartHoldTimer(1)]  # parks at what it promised
    assert follower.message(Meet(1, 6)) == [Unpark()]  # a peer is further
    follower.counter = 6
    assert follower.poll() == [StartHoldTimer(1), RunBeforeApply(1)]


def test_b1_the_flag_is_set_before_the_counter_is_read() -> None:
    class Watched(Follower):
        seen: bool | None = None

        @property
        def counter(self) -> int:
            self.seen = self.__dict__.get("flag")
            return 3

        @counter.setter
        def counter(self, value: int) -> None:
            assert value == 0

    follower = Watched()
    assert follower.message(Hold(1)) == [ToLeader(Promise(1, 4))]
    assert follower.seen is True


def test_b2_answers_to_an_earlier_hold_are_dropped() -> None:
    leader = landed()
    leader.promise(0, Promise(1, 5))
    out = leader.withdraw(0, WithdrawHold(1, "parked for hold_timeout_s"))
    assert released(out).reason == "worker 0: parked for hold_timeout_s (still missing: worker 1)"
    assert ToWorkers(Hold(2)) in out
    assert leader.promise(1, Promise(1, 9)) == []
    leader.promise(0, Promise(2, 5))
    assert leader.promise(1, Promise(2, 6)) == [ToWorkers(Meet(2, 6))]


def test_b2_a_follower_drops_what_is_not_of_its_hold() -> None:
    follower = Follower()
    follower.message(Hold(2))
    assert follower.message(Meet(1, 1)) == []
    assert follower.message(Release(1, "old")) == []
    assert follower.flag


def parked(*, ready: bool = True) -> Follower:
    follower = Follower()
    follower.message(Hold(1))
    follower.message(Meet(1, 1))
    follower.counter = 1
    assert follower.poll() == [StartHoldTimer(1), RunBeforeApply(1)]
    if ready:
        assert follower.before_apply_done(1) == [ToLeader(Ready(1))]
    return follower


def test_b3_a_cancelled_poll_stays_until_the_answer_and_applies() -> None:
    follower = parked()
    assert follower.cancelled() == [ToLeader(WithdrawHold(1, "its poll was cancelled"))]
    assert follower.cancelled() == []
    assert follower.message(Commit(1, 1, 42)) == [Apply(1, 1, 42)]
    assert follower.applied(1, "applied") == [ToLeader(WorkerApplied(1, "applied"))]
    assert follower.message(Done(1, "applied")) == [Leave(1, 42, "applied")]
    assert not follower.flag


def test_b3_a_withdrawal_after_the_commit_is_ignored() -> None:
    leader = committed()
    assert leader.withdraw(1, WithdrawHold(1, "cancelled")) == []
    assert leader.refuse(1, Refuse(1, "late")) == []


def test_b4_in_doubt_means_tainted() -> None:
    assert parked().leader_lost("killed") == [PollFails("killed", tainted=True)]
    clean = parked(ready=False)
    assert clean.leader_lost("killed") == [PollFails("killed")]
    assert clean.poll() == [PollFails("killed")]


def test_b4_released_is_not_in_doubt() -> None:
    follower = parked()
    assert follower.message(Release(1, "worker 1 is lost")) == [Unpark("worker 1 is lost")]
    assert follower.leader_lost("killed") == []
    assert follower.flag
    assert follower.poll() == [PollFails("killed")]


def test_b4_the_loss_during_apply_is_told_when_apply_has_ended() -> None:
    follower = parked()
    follower.message(Commit(1, 1, 42))
    assert follower.leader_lost("killed") == []
    assert follower.applied(1, "applied") == [PollFails("killed", tainted=True)]


def test_a_lost_worker_releases_the_others_before_a_commit_only() -> None:
    out = met(landed()).worker_lost(1, "killed")
    assert released(out).reason == "worker 1 is lost: killed (still missing: worker 0, 1)"
    assert out[-1] == EngineBroken("worker 1 is lost: killed")
    assert committed().worker_lost(1, "killed") == [EngineBroken("worker 1 is lost: killed")]


def test_a_refusal_releases_all_and_the_ticket_is_tried_again() -> None:
    leader = met(landed())
    out = leader.refuse(1, Refuse(1, "decoding"))
    assert released(out).reason.startswith("worker 1 refused: decoding")
    assert ToWorkers(Hold(2)) in out
    follower = parked(ready=False)
    assert follower.refused(1, "decoding") == [ToLeader(Refuse(1, "decoding"))]
    assert follower.message(Release(1, "why")) == [Unpark("why")]


def test_a_hook_that_ends_after_the_release_changes_nothing() -> None:
    follower = parked(ready=False)
    follower.message(Release(1, "why"))
    assert follower.before_apply_done(1) == []
    assert follower.refused(1, "late") == []


def test_polls_too_far_apart_are_an_error_for_every_worker() -> None:
    leader = landed()
    leader.promise(0, Promise(1, 5))
    release = released(leader.promise(1, Promise(1, 10)))
    assert release.protocol_error
    assert "worker 0: poll 5, worker 1: poll 10" in release.reason
    follower = parked()
    assert follower.message(release) == [PollFails(release.reason, protocol_error=True)]
    unaware = Follower()
    unaware.message(Hold(1))
    assert unaware.message(release) == []
    assert unaware.poll() == [PollFails(release.reason, protocol_error=True)]


def test_a_waiting_poll_takes_part_with_its_own_index() -> None:
    follower = Follower()
    follower.counter = 1
    assert follower.poll(wait=True) == []
    assert follower.message(Hold(1)) == [ToLeader(Promise(1, 1)), StartHoldTimer(1)]
    assert follower.wait_over() == []
    assert follower.message(Meet(1, 1)) == [RunBeforeApply(1)]


def test_a_waiting_poll_ends_by_time_or_cancellation() -> None:
    follower = Follower()
    follower.poll(wait=True)
    assert follower.wait_over() == [Unpark()]
    follower.poll(wait=True)
    assert follower.cancelled() == [Unpark()]
    assert follower.message(Hold(1)) == [ToLeader(Promise(1, 1))]


def test_the_hold_timeout_counts_from_the_park_and_is_void_after_the_commit() -> None:
    follower = parked()
    assert follower.hold_timed_out(9) == []
    assert follower.hold_timed_out(1) == [ToLeader(WithdrawHold(1, "parked for hold_timeout_s"))]
    follower = parked()
    follower.message(Commit(1, 1, 42))
    assert follower.hold_timed_out(1) == []


def test_mixed_answers_taint_the_engine() -> None:
    leader = committed()
    leader.applied(0, WorkerApplied(1, "applied"))
    assert leader.applied(1, WorkerApplied(1, "aborted", "pointer moved")) == [
        ToWorkers(Done(1, "tainted")),
        ToCoordinator(Finished(1, "tainted", "worker 1: pointer moved")),
    ]


def test_an_abort_before_the_commit_voids_the_grant_for_all_workers() -> None:
    leader = met(landed())
    abort = TicketAborted(1, ("e",), "cancelled")
    out = leader.ticket_aborted(abort)
    assert out[0] == ToWorkers(abort)
    assert released(out).reason.startswith("ticket 1 was aborted: cancelled")
    assert out[-1] == ToCoordinator(Finished(1, "aborted", "cancelled"))
    assert leader.ready(0, Ready(1)) == []


def test_an_abort_after_the_commit_loses() -> None:
    leader = committed()
    assert leader.ticket_aborted(TicketAborted(1, ("e",), "cancelled")) == []
    leader.applied(0, WorkerApplied(1, "applied"))
    assert ToCoordinator(Finished(1, "applied")) in leader.applied(1, WorkerApplied(1, "applied"))


def test_direct_an_abort_with_bytes_missing_reaches_the_workers() -> None:
    leader = direct()
    leader.serve(SERVE)
    leader.landed(0, Landed(1))
    abort = TicketAborted(1, ("e",), "rank 0 is lost")
    assert leader.ticket_aborted(abort) == [ToWorkers(abort)]
    leader.applied(0, WorkerApplied(1, "tainted"))
    assert ToCoordinator(Finished(1, "tainted")) in leader.applied(1, WorkerApplied(1, "aborted"))


def filled() -> Leader:
    """A leader that has offered, and holds its workers: worker 1 has room for a part of ticket 1 only."""
    leader = pinned()
    leader.serve(SERVE)
    assert leader.landed(1, Landed(1, whole=False)) == []
    assert leader.landed(0, Landed(1)) == [ToWorkers(Hold(1))]
    return leader


def test_s1_an_engine_is_held_when_its_rings_are_full_and_landed_is_told_later() -> None:
    leader = met(filled())
    leader.ready(0, Ready(1))
    assert leader.ready(1, Ready(1)) == [ToWorkers(Commit(1, 1, 42))]
    assert leader.landed(1, Landed(1, whole=False)) == []  # again: nothing new
    assert leader.landed(1, Landed(1)) == [ToCoordinator(Landed(1))]
    leader.applied(0, WorkerApplied(1, "applied"))
    assert ToCoordinator(Finished(1, "applied")) in leader.applied(1, WorkerApplied(1, "applied"))


def test_s1_a_full_ring_of_another_ticket_counts_for_nothing() -> None:
    leader = pinned()
    leader.serve(SERVE)
    leader.landed(0, Landed(1))
    assert leader.landed(1, Landed(9, whole=False)) == []


def test_s1_a_hold_that_ends_without_a_commit_is_begun_again() -> None:
    out = met(filled()).withdraw(0, WithdrawHold(1, "its poll was cancelled"))
    assert isinstance(released(out), Release)
    assert out[-1] == ToWorkers(Hold(2))


def test_s2_an_abort_before_the_commit_ends_the_grant_and_after_it_the_workers_decide() -> None:
    abort = TicketAborted(1, ("e",), "rank 0 is lost")
    assert met(filled()).ticket_aborted(abort)[-1] == ToCoordinator(Finished(1, "aborted", "rank 0 is lost"))
    leader = met(filled())
    leader.ready(0, Ready(1))
    leader.ready(1, Ready(1))
    assert leader.ticket_aborted(abort) == [ToWorkers(abort)]
    leader.applied(0, WorkerApplied(1, "applied"))
    assert ToCoordinator(Finished(1, "tainted")) in leader.applied(1, WorkerApplied(1, "tainted"))


def test_s2_when_all_has_landed_an_abort_loses() -> None:
    leader = met(filled())
    leader.ready(0, Ready(1))
    leader.ready(1, Ready(1))
    leader.landed(1, Landed(1))
    assert leader.ticket_aborted(TicketAborted(1, ("e",), "cancelled")) == []


def test_s3_a_commit_does_not_outlive_the_coordinator_for_ever() -> None:
    leader = met(filled())
    leader.ready(0, Ready(1))
    leader.ready(1, Ready(1))
    assert leader.coordinator_lost() == [StartGrantTimer(1)]
    (told,) = leader.grant_timed_out(1)
    assert isinstance(told, ToWorkers)
    assert isinstance(told.message, TicketAborted)


def test_e1_a_new_incarnation_waits_for_the_outstanding_commit() -> None:
    leader = committed()
    leader.coordinator_lost()
    assert leader.leave() == []
    leader.applied(0, WorkerApplied(1, "applied"))
    out = leader.applied(1, WorkerApplied(1, "applied"))
    assert out[0] == ToWorkers(Done(1, "applied"))
    assert out[-1] == Separated()


def test_e1_a_new_incarnation_releases_a_hold_first() -> None:
    leader = met(landed())
    out = leader.leave()
    assert released(out).reason.startswith("ticket 1 was aborted: the membership changed")
    assert out[-1] == Separated()


def test_e2_tickets_of_a_new_incarnation_are_not_measured_by_the_old() -> None:
    leader = direct()
    leader.serve(SERVE)
    for worker in (0, 1):
        leader.landed(worker, Landed(1))
        leader.applied(worker, WorkerApplied(1, "applied"))
    assert leader.leave() == [Separated()]
    leader.announced(Announced(1, 7, 1))
    leader.vacant(0, Vacant(0, parked=True))
    assert leader.vacant(1, Vacant(0, parked=True)) == [ToWorkers(Hold(2))]


def test_e3_parked_workers_are_let_go_when_the_coordinator_is_lost() -> None:
    leader = direct()
    assert leader.coordinator_lost() == [ToWorkers(Release(1, "the coordinator is lost"))]
    assert leader.serve(SERVE)[0] == ToCoordinator(
        Finished(1, "aborted", "the engine is not waiting for a grant")
    )


@pytest.mark.parametrize("is_direct", [True, False])
def test_e3_a_grant_that_perhaps_reached_only_us_is_given_up(is_direct: bool) -> None:
    leader = direct() if is_direct else pinned()
    leader.serve(SERVE)
    assert leader.coordinator_lost() == [StartGrantTimer(1)]
    out = leader.grant_timed_out(1)
    assert isinstance(out[0], ToWorkers)
    assert isinstance(out[0].message, TicketAborted)


def test_a_landed_grant_completes_without_the_coordinator() -> None:
    leader = met(landed())
    assert leader.coordinator_lost() == []
    leader.ready(0, Ready(1))
    assert leader.ready(1, Ready(1)) == [ToWorkers(Commit(1, 1, 42))]
