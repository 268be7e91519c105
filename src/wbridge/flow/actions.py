"""Every action of the state machines: what a driver does for them, besides feeding events.

A machine's method returns actions in the order in which to perform them. Messages of one connection
must keep that order; nothing else is assumed about order or time.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from wbridge.flow.messages import (
    Announced,
    CallAborted,
    Commit,
    Done,
    EngineOutcome,
    Finished,
    Hold,
    Landed,
    Meet,
    Offer,
    OfferRefused,
    Overdue,
    Promise,
    Ready,
    Refuse,
    Release,
    Retired,
    Serve,
    TicketAborted,
    TooLate,
    Vacant,
    WithdrawHold,
    WithdrawOffer,
    WorkerApplied,
)

# Coordinator: Tickets --------------------------------------------------------------------------------

Recipient: TypeAlias = tuple[Literal["rank"], int] | tuple[Literal["leader"], str]
"""A trainer rank, or the leader of an engine."""

FromCoordinator: TypeAlias = (
    Announced
    | CallAborted
    | TooLate
    | Serve
    | TicketAborted
    | Overdue
    | Retired
    | EngineOutcome
    | OfferRefused
)


class To(msgspec.Struct, frozen=True):
    """Send `message` to each of `recipients`."""

    recipients: tuple[Recipient, ...]
    message: FromCoordinator


class StartPatience(msgspec.Struct, frozen=True):
    """Call `Tickets.patience_passed(ticket)` after `relay_patience_s`, even if the ticket is over by then:
    a newer one may share its timer."""

    ticket: int


class StartGrace(msgspec.Struct, frozen=True):
    """Call `Tickets.grace_passed(engine, served)` after as long as a version took to arrive last."""

    engine: str
    served: int
    """The ticket that the engine was granted last, or 0."""


class StartDeadline(msgspec.Struct, frozen=True):
    """Call `Tickets.update_deadline_passed(ticket)` after `update_timeout_s`."""

    ticket: int


class StartCallDeadline(msgspec.Struct, frozen=True):
    """Call `Tickets.call_deadline_passed(call)` after `update_timeout_s`."""

    call: int


TicketsAction: TypeAlias = To | StartPatience | StartGrace | StartDeadline | StartCallDeadline

# Leader ----------------------------------------------------------------------------------------------

FromLeader: TypeAlias = Hold | Meet | Commit | Done | Release | Serve | TicketAborted
ToCoordinatorMessage: TypeAlias = Offer | WithdrawOffer | Landed | Finished


class ToWorkers(msgspec.Struct, frozen=True):
    """Send `message` to every worker of the engine, the leader's own included."""

    message: FromLeader


class ToCoordinator(msgspec.Struct, frozen=True):
    message: ToCoordinatorMessage


class StartGrantTimer(msgspec.Struct, frozen=True):
    """The coordinator is lost: call `Leader.grant_timed_out(ticket)` after `coordinator_timeout_s`."""

    ticket: int


class EngineBroken(msgspec.Struct, frozen=True):
    """A worker is lost: close the engine-local connections, so that the others notice, and stop."""

    reason: str


class Separated(msgspec.Struct, frozen=True):
    """Answer to `Leader.leave`: nothing of the old membership is under way. Tell the workers to follow
    into the new one, over the connections that carried the messages before."""


LeaderAction: TypeAlias = ToWorkers | ToCoordinator | StartGrantTimer | EngineBroken | Separated

# Follower --------------------------------------------------------------------------------------------


class ToLeader(msgspec.Struct, frozen=True):
    """Send `message` to the leader of this engine."""

    message: Promise | Ready | Refuse | WithdrawHold | WorkerApplied | Landed | Vacant


class StartHoldTimer(msgspec.Struct, frozen=True):
    """This worker has parked: call `Follower.hold_timed_out(hold)` after `hold_timeout_s`."""

    hold: int


class RunBeforeApply(msgspec.Struct, frozen=True):
    """Run the hook in the caller's context, then call `Follower.before_apply_done(hold)` or
    `Follower.refused(hold, reason)`."""

    hold: int


class Apply(msgspec.Struct, frozen=True):
    """Overwrite the live parameters with this ticket, then call `Follower.applied(hold, ...)`.

    With direct receiver staging its bytes have yet to arrive. Not to be cancelled.
    """

    hold: int
    ticket: int
    version: int


class Leave(msgspec.Struct, frozen=True):
    """The parked poll returns: with the update if `outcome` is `applied`, None if `aborted`, else an
    error. A cancellation that came meanwhile is delivered now."""

    ticket: int
    version: int
    outcome: Literal["applied", "aborted", "tainted"]
    lag: int = 0


class Unpark(msgspec.Struct, frozen=True):
    """The poll returns None. `reason` says why a hold ended, if one did."""

    reason: str = ""


class PollFails(msgspec.Struct, frozen=True):
    """The poll, and each later one, raises: `PeerLost`, or `ProtocolError` if `protocol_error`.

    `tainted`: whether this worker's parameters may differ from its peers'; then it reports no version.
    """

    reason: str
    tainted: bool = False
    protocol_error: bool = False


FollowerAction: TypeAlias = ToLeader | StartHoldTimer | RunBeforeApply | Apply | Leave | Unpark | PollFails

# ReceiverRing ----------------------------------------------------------------------------------------


class GiveCredit(msgspec.Struct, frozen=True):
    """Expose the bytes of this piece in `slot` to `writer`, once, and send it the `Credit`."""

    writer: str
    ticket: int
    group: int
    piece: int
    slot: int


class GroupReady(msgspec.Struct, frozen=True):
    """All pieces of the group are in `slot`. Before reading it call `draining(slot, ticket)`."""

    ticket: int
    group: int
    slot: int


class TakeBack(msgspec.Struct, frozen=True):
    """`slot` is quarantined: `writers` may still write it. Call `taken_back(slot, ticket, writer)` for
    each of which the transport proves that it will not, `abandon(slot, ticket)` after `fence_timeout_s`."""

    slot: int
    ticket: int
    writers: tuple[str, ...]


class ReplaceSlot(msgspec.Struct, frozen=True):
    """Give `slot` new memory; the old stays mapped and is counted. Then call `replaced(slot)`."""

    slot: int


RingAction: TypeAlias = GiveCredit | GroupReady | TakeBack | ReplaceSlot | ToLeader

# Outgoing --------------------------------------------------------------------------------------------


class StartPut(msgspec.Struct, frozen=True):
    """Gather this piece into a local slot and put it under its credit; then call
    `put_ended(receiver, ticket, group, piece)`, whatever came of it, once neither end is touched any more."""

    receiver: str
    ticket: int
    group: int
    piece: int


class CancelPut(msgspec.Struct, frozen=True):
    """The put is not wanted any more. `put_ended` is due as before."""

    receiver: str
    ticket: int
    group: int
    piece: int


class Flush(msgspec.Struct, frozen=True):
    """Flush the endpoint to `receiver`, then call `flushed(receiver, ticket, group)`."""

    receiver: str
    ticket: int
    group: int


class SendStopped(msgspec.Struct, frozen=True):
    """Send `Stopped(ticket, group)` to `receiver`, behind the notifications of all earlier puts."""

    receiver: str
    ticket: int
    group: int


class FreeSource(msgspec.Struct, frozen=True):
    """Nobody reads the source of `ticket` any more: release its snapshot, or let the send return."""

    ticket: int


OutgoingAction: TypeAlias = StartPut | CancelPut | Flush | SendStopped | FreeSource
