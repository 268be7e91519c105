"""All interleavings of small jobs, run on the product's own state machines.

Each model passes as it is, and fails when one rule of the protocol is switched off: a model that can not
fail shows nothing. The names of the switched-off rules are those of the protocol's design (A to E).
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.property.explorer import explore
from tests.property.lockstep_model import LockstepWorld
from tests.property.loss_model import LossWorld
from tests.property.ring_model import RingWorld
from tests.property.ticket_model import TicketWorld
from wbridge.flow.actions import LeaderAction, Separated, ToLeader, ToWorkers, Unpark
from wbridge.flow.calls import Calls
from wbridge.flow.follower import Follower
from wbridge.flow.leader import Leader
from wbridge.flow.messages import CallAborted, Promise, Report, Stopped, TicketAborted, TooLate, WithdrawCall
from wbridge.flow.outgoing import Outgoing
from wbridge.flow.records import TicketRecord
from wbridge.flow.ring import ReceiverRing
from wbridge.flow.tickets import Tickets

SYNC: dict[str, Any] = {"sender_direct": True, "receiver_direct": True}


def case(*parts: Any, slow: bool = False, **options: Any) -> Any:
    name = ", ".join([*map(str, parts), *(f"{key}={value}" for key, value in options.items())])
    marks = [pytest.mark.slow, pytest.mark.timeout(600)] if slow else []
    return pytest.param(*parts, options, id=name, marks=marks)


# A. Tickets ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        case(delivery="latest", num_ranks=1),
        case(delivery="every", num_engines=1),
        case(delivery="every", slow=True),
        case(delivery="latest", **SYNC),
        case(delivery="every", num_versions=3, **SYNC),
        case(delivery="every", engine_losses=1, **SYNC),
        case(delivery="latest", num_ranks=1, engine_losses=1, **SYNC),
        case(delivery="latest", engine_losses=1, slow=True, **SYNC),
        case(delivery="every", num_versions=1, cancels=1),
        case(delivery="latest", num_versions=1, cancels=1),
        case(delivery="every", num_snapshots=2, num_ranks=1),
        case(delivery="latest", sender_direct=True, num_ranks=1),
        case(delivery="every", num_snapshots=2, receiver_direct=True, num_ranks=1),
        case(delivery="every", num_versions=1, num_ranks=1, slow_engines=True, deadlines=1, **SYNC),
        case(delivery="latest", num_versions=1, num_ranks=1, slow_engines=True, deadlines=1, **SYNC),
        case(delivery="every", num_versions=2, cancels=1, slow=True, **SYNC),
        case(delivery="latest", slow=True, num_versions=2, cancels=1),
        case(delivery="every", slow=True, num_versions=2, cancels=1),
        case(delivery="latest", slow=True, num_versions=3, **SYNC),
        case(delivery="latest", slow=True, num_snapshots=2, num_ranks=1, num_versions=3),
        case(delivery="latest", slow=True, num_snapshots=2, receiver_direct=True),
        case(delivery="latest", slow=True, engine_losses=1),
        case(delivery="latest", slow=True, deadlines=1),
        case(
            delivery="latest",
            slow=True,
            num_versions=1,
            slow_engines=True,
            deadlines=1,
            engine_losses=1,
            **SYNC,
        ),
    ],
)
def test_tickets(options: dict[str, Any]) -> None:
    found = explore(TicketWorld(**options))
    assert not found.verdict, str(found)


class WithdrawByVersion(Calls):
    """A4 off: ranks are matched by version, and a withdrawal takes back what is pending of it."""

    def report(self, rank: int, report: Report) -> Any:
        queues = self.__dict__.setdefault("queues", {r: [] for r in range(self.num_ranks)})
        queues[rank].append(report)
        heads = [queue[0] for queue in queues.values() if queue]
        if len(heads) < self.num_ranks or len({head.version for head in heads}) > 1:
            return None
        for queue in queues.values():
            self.announced[queue.pop(0).call] = 0
        return heads[0]

    def burn(self, call: int, reason: str, **_: Any) -> tuple[tuple[int, ...], CallAborted]:
        told = (
            {0, 1} if any(self.__dict__.get("queues", {}).values()) else {self.__dict__.get("canceller", 0)}
        )
        self.__dict__["queues"] = {r: [] for r in range(self.num_ranks)}
        return tuple(told), CallAborted(call, reason)


class OnlyNewerCloses(Tickets):
    def _out_of_snapshots(self, ticket: TicketRecord) -> bool:
        return False


class NotNewestCloses(Tickets):
    def _close_if_through(self, ticket: TicketRecord, out: list[Any]) -> None:
        if ticket.number + 1 < self.next_ticket:
            self._close(ticket, "superseded", out)
        super()._close_if_through(ticket, out)


class CancelOnlyStopsWaiting(Tickets):
    def withdraw(self, rank: int, withdraw: WithdrawCall) -> list[Any]:
        announced = self._calls.announced.get(withdraw.call)
        if announced is None:
            return super().withdraw(rank, withdraw)
        return [self._ranks(TooLate(withdraw.call, announced), [rank])]


class WithdrawalAnswersReportsOnly(Tickets):
    def withdraw(self, rank: int, withdraw: WithdrawCall) -> list[Any]:
        self._calls._waiting.clear()
        return super().withdraw(rank, withdraw)


class RetiresEarly(Tickets):
    """A closed ticket is retired although its grants are still being written."""

    def _settle(self, out: list[Any]) -> list[Any]:
        for ticket in self._tickets.values():
            if ticket.closed:
                ticket.landed |= ticket.granted
        return super()._settle(out)


@pytest.mark.parametrize(
    ("verdict", "broken", "options"),
    [
        case("stuck", OnlyNewerCloses, delivery="latest", num_ranks=1),  # A2
        case("skips", NotNewestCloses, delivery="every", num_snapshots=2, num_ranks=1),  # A3
        case("still reads", CancelOnlyStopsWaiting, delivery="every", num_ranks=1, cancels=1, **SYNC),  # A5
        case("stuck", WithdrawalAnswersReportsOnly, delivery="latest", num_engines=1, cancels=1),  # A6
        case("stuck", RetiresEarly, delivery="latest", num_ranks=1, num_engines=1),
    ],
)
def test_tickets_without_a_rule(verdict: str, broken: type[Tickets], options: dict[str, Any]) -> None:
    found = explore(TicketWorld(tickets=broken, **options))
    assert verdict in found.verdict, str(found)


def test_tickets_without_a1(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grant that protects the snapshot until the commit lets one silent engine stop the trainer."""
    monkeypatch.setattr(TicketRecord, "in_flight", property(lambda t: t.granted - t.voided - t.final))
    found = explore(TicketWorld(delivery="latest", num_ranks=1))
    assert "stuck" in found.verdict, str(found)


def test_tickets_without_a4(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matched by version, a withdrawn send of one rank meets another rank's earlier try."""
    monkeypatch.setattr("wbridge.flow.tickets.Calls", WithdrawByVersion)
    world = TicketWorld(delivery="every", num_versions=1, num_engines=1, cancels=1, **SYNC)
    assert explore(world).verdict


# B. Lockstep ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        *[case(depends=d) for d in ("tp", "pp", "free")],
        *[case(depends=d, direct=True) for d in ("tp", "pp", "free")],
        *[case(depends=d, deaths=1) for d in ("tp", "pp")],
        *[case(depends=d, deaths=1, leader_dies=True) for d in ("tp", "pp")],
        *[case(depends=d, direct=True, aborts=1) for d in ("tp", "pp", "free")],
        case(depends="tp", timeouts=1),
        *[case(depends=d, slow=True, cancels=1, refusals=1) for d in ("tp", "pp", "free")],
        *[case(depends=d, slow=True, timeouts=1) for d in ("pp", "free")],
        *[case(depends=d, slow=True, aborts=1, slow_apply=True) for d in ("tp", "pp")],
        *[case(depends=d, slow=True, direct=True, cancels=1) for d in ("tp", "pp", "free")],
        *[case(depends="free", slow=True, deaths=1, leader_dies=who) for who in (False, True)],
        case(depends="tp", slow=True, num_workers=3),
        case(depends="tp", slow=True, num_workers=3, deaths=1, leader_dies=True),
        case(depends="tp", slow=True, num_tickets=2, timeouts=1),
    ],
)
def test_lockstep(options: dict[str, Any]) -> None:
    found = explore(LockstepWorld(**options))
    assert not found.verdict, str(found)


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


@pytest.mark.parametrize(
    ("verdict", "options"),
    [
        case("stuck", depends="tp", follower=ReportsWhenParked),
        case("stuck", depends="pp", follower=ReportsWhenParked),
        case("", depends="tp", timeouts=1, leader=OneHoldId),
        case("", depends="tp", cancels=1, follower=CancelledLeaves),
        case("clean", depends="tp", deaths=1, leader_dies=True, follower=NeverInDoubt),
        case("after its commit", depends="tp", aborts=1, slow_apply=True, leader=AbortsCommitted),
    ],
)
def test_lockstep_without_a_rule(verdict: str, options: dict[str, Any]) -> None:
    found = explore(LockstepWorld(**options))
    assert found.verdict and verdict in found.verdict, str(found)


# C. Slots and credits ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        case(num_groups=4),
        case(num_groups=3, num_slots=1),
        case(num_groups=3, absent="B"),
        case(num_groups=3, moves=1),
        case(num_groups=2, num_slots=1, aborts=1),
        case(num_groups=3, deaths=1),
        case(slow=True, num_groups=2, num_slots=2, aborts=1),
        case(slow=True, num_groups=3, num_slots=1, aborts=1, fences=1),
        case(slow=True, num_groups=3, aborts=1),
        case(slow=True, num_groups=4, moves=1),
    ],
)
def test_rings(options: dict[str, Any]) -> None:
    found = explore(RingWorld(**options))
    assert not found.verdict, str(found)


class CreditsOnlyFreedSlots(ReceiverRing):
    """C1 off: taking a grant gives no credits."""

    def grant(self, ticket: int, groups: Any) -> list[Any]:
        before, self._credit = self._credit, lambda *_: None  # type: ignore[method-assign]
        try:
            return super().grant(ticket, groups)
        finally:
            del self.__dict__["_credit"]
            del before


class WritersCountSlots(RingWorld):
    """C2 off: each writer works the slot out from the grants that it has seen."""

    def credit(self, name: str) -> None:
        ticket, group, piece, _ = self.writers[name].credits[0]
        seen = ticket - 1 - (name == self.absent)
        slot = (seen * len(self.plan) + group) % len(self.memory)
        self.writers[name].credits[0] = (ticket, group, piece, slot)
        super().credit(name)


class StopsOnlyForTheTicket(Outgoing):
    """C3 off: a writer that loses a range says so only when it is through with the ticket."""

    def give_up(self, receiver: str, ticket: int, group: int, piece: int) -> list[Any]:
        share = self._share(ticket, receiver)
        if share is not None:
            share.due.discard((group, piece))
        return []


class ForgetsStops(ReceiverRing):
    """C4 off."""

    def stopped(self, writer: str, message: Stopped) -> list[Any]:
        out = super().stopped(writer, message)
        self._stops.clear()
        return out


class NoFence(ReceiverRing):
    """C5 off: a slot is free although a credited writer may still write it."""

    def _vacate(self, index: int, out: list[Any]) -> None:
        self._slots[index].may_write.clear()
        super()._vacate(index, out)


@pytest.mark.parametrize(
    ("verdict", "world", "options"),
    [
        case("stuck", RingWorld, num_groups=2, ring=CreditsOnlyFreedSlots),
        case("late write", WritersCountSlots, num_groups=3, absent="B"),
        case("stuck", RingWorld, num_groups=4, moves=1, outgoing=StopsOnlyForTheTicket),
        case("stuck", RingWorld, num_groups=2, num_slots=1, aborts=1, ring=ForgetsStops),
        case("late write", RingWorld, num_groups=2, num_slots=1, aborts=1, ring=NoFence),
    ],
)
def test_rings_without_a_rule(verdict: str, world: type[RingWorld], options: dict[str, Any]) -> None:
    found = explore(world(**options))
    assert verdict in found.verdict, str(found)


# E. Loss of the coordinator --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        case(depends="pp", direct=True, restart=False),
        case(depends="pp", direct=False, restart=False),
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
    ],
)
def test_loss_without_a_rule(broken: type[Leader], options: dict[str, Any]) -> None:
    found = explore(LossWorld(depends="pp", leader=broken, **options))
    assert found.verdict, str(found)
