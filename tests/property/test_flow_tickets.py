"""All interleavings of small jobs of tickets, run on the product's own state machines.

The models pass as they are, and fail when one rule of the protocol is switched off: a model that can not
fail shows nothing. `A1` to `A6` are the rules of announcing, granting and retiring.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.property.explorer import case, explore
from tests.property.ticket_model import TicketWorld
from wbridge.flow.calls import Calls, to_ranks
from wbridge.flow.messages import CallAborted, Report, TooLate, WithdrawCall
from wbridge.flow.records import TicketRecord
from wbridge.flow.tickets import Tickets

SYNC: dict[str, Any] = {"sender_direct": True, "receiver_direct": True}


@pytest.mark.parametrize(
    "options",
    [
        case(delivery="latest", num_ranks=1),
        case(delivery="every", num_engines=1),
        case(delivery="every", slow=True),
        case(delivery="latest", **SYNC),
        case(delivery="every", num_versions=3, **SYNC),
        case(delivery="every", engine_losses=1, **SYNC),
        case(delivery="every", early=True, num_versions=3, **SYNC),
        case(delivery="every", early=True, num_versions=1, num_ranks=1, deadlines=1, engine_losses=1, **SYNC),
        case(delivery="every", early=True, slow=True, num_versions=2, cancels=1, **SYNC),
        case(delivery="latest", num_ranks=1, engine_losses=1, **SYNC),
        case(delivery="latest", engine_losses=1, slow=True, **SYNC),
        case(delivery="every", num_versions=1, cancels=1),
        case(delivery="latest", num_versions=1, cancels=1),
        case(delivery="every", late_ranks=True, num_engines=1, **SYNC),
        case(delivery="latest", late_ranks=True, num_engines=1),
        case(delivery="latest", late_ranks=True, num_snapshots=2, slow=True),
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
        case(delivery="latest", entered=((1, 1), (0, 0)), num_engines=1),
        case(delivery="every", entered=((0, 0), (1, 1)), num_snapshots=2, num_engines=1),
        case(delivery="every", entered=((1, 0), (0, 0)), num_engines=1, **SYNC),
        case(delivery="latest", entered=((1, 1), (1, 0)), num_engines=1),
        case(delivery="every", entered=((1, 0), (1, 1)), num_engines=1, num_snapshots=2),
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
            return None, []
        for queue in queues.values():
            self.announced[queue.pop(0).call] = 0
        return heads[0], []

    def burn(self, call: int, reason: str, **_: Any) -> list[Any]:
        told = (
            {0, 1} if any(self.__dict__.get("queues", {}).values()) else {self.__dict__.get("canceller", 0)}
        )
        self.__dict__["queues"] = {r: [] for r in range(self.num_ranks)}
        return [to_ranks(sorted(told), CallAborted(call, reason))]


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
        return [to_ranks([rank], TooLate(withdraw.call, announced))]


class WithdrawalAnswersReportsOnly(Tickets):
    def withdraw(self, rank: int, withdraw: WithdrawCall) -> list[Any]:
        self._calls._waiting.clear()
        return super().withdraw(rank, withdraw)


class WaitsForLateRanks(Tickets):
    def call_deadline_passed(self, call: int) -> list[Any]:
        return []


class BurnsForReportsOnly(Tickets):
    """A rank that waits for a snapshot in the call is not told."""

    def call_deadline_passed(self, call: int) -> list[Any]:
        waiting, self._calls._waiting = self._calls._waiting, {}
        out = super().call_deadline_passed(call)
        self._calls._waiting = waiting
        return out


class ForgetsEarlierCalls(Tickets):
    def __init__(self, *, num_calls: int, **more: Any) -> None:
        super().__init__(**more)


class SkipsNothing(Tickets):
    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self._calls = CallsInStep(self._calls.num_ranks, more["num_calls"])


class CallsInStep(Calls):
    def _may_skip(self, call: int) -> bool:
        return False


class NoGracePasses(Tickets):
    """An engine that is busy with an older version is waited for, however long that takes."""

    def grace_passed(self, engine: str, served: int) -> list[Any]:
        return []


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
        case("stuck", WaitsForLateRanks, delivery="every", late_ranks=True, num_engines=1, **SYNC),
        case("stuck", BurnsForReportsOnly, delivery="latest", late_ranks=True, num_engines=1),
        case("stuck", ForgetsEarlierCalls, delivery="latest", entered=((1, 1), (0, 0)), num_engines=1),
        case("stuck", SkipsNothing, delivery="latest", entered=((1, 1), (1, 0)), num_engines=1),
        case("stuck", NoGracePasses, delivery="latest", num_snapshots=2, num_ranks=1),
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
