"""All interleavings of small jobs of one engine, run on the product's own state machines.

The models pass as they are, and fail when one rule of the protocol is switched off: a model that can not
fail shows nothing. `B1` to `B4` are the rules of the lockstep, `E1` to `E3` those of losing the coordinator,
`S1` to `S3` those of rings that hold less than a version.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.property.explorer import case, explore
from tests.property.lockstep_model import LockstepWorld
from tests.property.loss_model import LossWorld
from wbridge.flow.actions import LeaderAction, Separated, ToLeader, ToWorkers, Unpark
from wbridge.flow.follower import Follower
from wbridge.flow.leader import Leader
from wbridge.flow.messages import Landed, Promise, TicketAborted


@pytest.mark.parametrize(
    "options",
    [
        *[case(depends=d) for d in ("tp", "pp", "free")],
        *[case(depends=d, direct=True) for d in ("tp", "pp", "free")],
        *[case(depends=d, early=True) for d in ("tp", "pp", "free")],
        *[case(depends=d, deaths=1) for d in ("tp", "pp")],
        *[case(depends=d, deaths=1, leader_dies=True) for d in ("tp", "pp")],
        *[case(depends=d, direct=True, aborts=1) for d in ("tp", "pp", "free")],
        case(depends="tp", timeouts=1),
        case(depends="tp", small=(0, 1)),
        case(depends="pp", brisk=True, small=(1,), aborts=1),
        case(depends="pp", brisk=True, small=(0, 1), failures=1),
        *[case(depends="pp", brisk=True, small=(0, 1), deaths=1, leader_dies=who) for who in (False, True)],
        *[case(depends=d, slow=True, small=(1,), aborts=1) for d in ("tp", "pp")],
        *[
            case(depends="free", slow=True, brisk=True, small=(0, 1), **{f: 1})
            for f in ("cancels", "timeouts")
        ],
        case(depends="pp", slow=True, brisk=True, small=(0, 1), failures=1, aborts=1, refusals=1),
        case(depends="pp", slow=True, brisk=True, small=(0, 1), num_tickets=2, aborts=1),
        case(depends="pp", slow=True, brisk=True, num_workers=3, small=(0, 2)),
        *[case(depends=d, slow=True, cancels=1, refusals=1) for d in ("tp", "pp")],
        *[case(depends=d, slow=True, timeouts=1) for d in ("pp", "free")],
        *[case(depends=d, slow=True, aborts=1, slow_apply=True) for d in ("tp", "pp")],
        *[case(depends=d, slow=True, direct=True, cancels=1) for d in ("tp", "pp", "free")],
        *[case(depends="free", slow=True, deaths=1, leader_dies=who) for who in (False, True)],
        *[case(depends=d, slow=True, early=True, aborts=1, slow_apply=True) for d in ("tp", "pp")],
        case(depends="tp", slow=True, num_workers=3),
        case(depends="pp", brisk=True, num_workers=3),
        case(depends="free", brisk=True, cancels=1, refusals=1),
        case(depends="pp", slow=True, brisk=True, num_workers=3, cancels=1),
        case(depends="pp", slow=True, brisk=True, num_workers=3, direct=True, aborts=1),
        case(depends="tp", slow=True, num_tickets=2, timeouts=1),
    ],
)
def test_lockstep(options: dict[str, Any]) -> None:
    found = explore(LockstepWorld(**options))
    assert not found.verdict, str(found)


class LandsBeforeTheyStand(Leader):
    """Direct staging: the coordinator hears of a version in the slots as with pinned staging."""

    _lands_when_parked: Any = property(lambda self: False, lambda self, value: None)


class ReportsWhenParked(Follower):
    """B1 off: the index is told when the poll stands, not promised at once."""

    def _held(self, hold: int) -> list[Any]:
        return [action for action in super()._held(hold) if not isinstance(action, ToLeader)]

    def _park(self) -> list[Any]:
        told = [] if self._meet is not None else [ToLeader(Promise(self._hold, self.counter))]
        return [*super()._park(), *told]


class OneHoldId(Leader):
    """B2 off: every hold has the same id."""

    _hold: Any = property(lambda self: 1, lambda self, value: None)


class CancelledLeaves(Follower):
    """B3 off: a cancelled poll does not wait for the answer."""

    def cancelled(self) -> list[Any]:
        out = super().cancelled()
        if out and not isinstance(out[0], Unpark):
            self._forget_hold()
            out.append(Unpark())
        return out


class NeverInDoubt(Follower):
    """B4 off: a lost leader leaves every worker clean."""

    def _fail(self, fails: Any) -> list[Any]:
        return super()._fail(type(fails)(fails.reason))


class AbortsCommitted(Leader):
    """An abort reaches the workers although a commit has been sent: the engine does not decide as one."""

    def _abort_grant(self, message: TicketAborted, out: list[Any]) -> None:
        if self._phase == "committed":
            out.append(ToWorkers(message))
        else:
            super()._abort_grant(message, out)


class HoldsWhenLanded(Leader):
    """S1 off: an engine is held when everything has landed, however small its rings."""

    def landed(self, worker: int, message: Landed) -> list[LeaderAction]:
        return super().landed(worker, message) if message.whole else []


class ThinksCommittedIsSafe(Leader):
    """S2 off: after the commit no abort reaches the workers, although bytes are missing."""

    def _abort_grant(self, message: TicketAborted, out: list[Any]) -> None:
        if self._phase != "committed":
            super()._abort_grant(message, out)


@pytest.mark.parametrize(
    ("verdict", "options"),
    [
        case("stuck", depends="tp", follower=ReportsWhenParked),
        case("stuck", depends="pp", follower=ReportsWhenParked),
        case("", depends="tp", timeouts=1, leader=OneHoldId),
        case("", depends="tp", cancels=1, follower=CancelledLeaves),
        case("clean", depends="tp", deaths=1, leader_dies=True, follower=NeverInDoubt),
        case("after its commit", depends="tp", aborts=1, slow_apply=True, leader=AbortsCommitted),
        case("not parked", depends="tp", early=True, leader=LandsBeforeTheyStand),
        case("stuck", depends="tp", small=(1,), leader=HoldsWhenLanded),
        case("stuck", depends="pp", brisk=True, small=(1,), aborts=1, leader=ThinksCommittedIsSafe),
    ],
)
def test_lockstep_without_a_rule(verdict: str, options: dict[str, Any]) -> None:
    found = explore(LockstepWorld(**options))
    assert found.verdict and verdict in found.verdict, str(found)


@pytest.mark.parametrize(
    "options",
    [
        case(depends="pp", direct=True, restart=False),
        case(depends="pp", direct=False, restart=False),
        case(depends="pp", slow=True, small=(0, 1), restart=False),
        case(depends="pp", slow=True, small=(1,), restart=False),
        case(depends="pp", slow=True, small=(0, 1), restart=True),
        case(depends="pp", slow=True, direct=True, restart=True),
        case(depends="pp", slow=True, direct=False, restart=True),
    ],
)
def test_loss_of_the_coordinator(options: dict[str, Any]) -> None:
    found = explore(LossWorld(**options))
    assert not found.verdict, str(found)


class ChangesInMidCommit(Leader):
    """E1 off: the new incarnation is accepted whatever is under way."""

    def leave(self) -> list[LeaderAction]:
        self._phase = "idle"
        self._forget_membership()
        return [Separated()]


class KeepsTicketOrder(Leader):
    """E2 off: the tickets of a new incarnation are measured by those of the old."""

    def _forget_membership(self) -> None:
        answered = self.__dict__.get("_answered", 0)
        super()._forget_membership()
        self._answered = answered


class ThinksCommittedCompletes(Leader):
    """S3 off: a commit counts as completing, although the rest of the bytes has yet to come."""

    def grant_timed_out(self, ticket: int) -> list[LeaderAction]:
        return [] if self._phase == "committed" else super().grant_timed_out(ticket)


class StaysParked(Leader):
    """E3 off: the loss of the coordinator changes nothing."""

    def coordinator_lost(self) -> list[LeaderAction]:
        self._connected = False
        return []


@pytest.mark.parametrize(
    ("broken", "options"),
    [
        case(ChangesInMidCommit, direct=True, restart=True, slow=True),
        case(KeepsTicketOrder, direct=True, restart=True, slow=True),
        case(StaysParked, direct=True, restart=False),
        case(ThinksCommittedCompletes, slow=True, small=(0, 1), restart=False),
    ],
)
def test_loss_without_a_rule(broken: type[Leader], options: dict[str, Any]) -> None:
    found = explore(LossWorld(depends="pp", leader=broken, **options))
    assert found.verdict, str(found)
