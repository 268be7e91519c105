"""Every message of the update protocol, in the order in which one update meets them.

Pure data: the state machines of this package take and return these structs; `control` frames them
for TCP and `engine` for the data path. Slots, credits, notifications, barriers and commits are keyed
(epoch, ticket); the epoch travels in the frame around the message, and a frame of another epoch is dropped.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Outcome = Literal["applied", "superseded", "missed", "tainted", "lost", "aborted"]
"""What became of one ticket on one engine. `aborted`: it ended without a byte of the engine's live
parameters changed."""


class _Message(msgspec.Struct, frozen=True, tag_field="kind"):
    """Base of all protocol messages: frozen and tagged by class name."""


# Trainer rank -> coordinator ----------------------------------------------------------------------


class Report(_Message, frozen=True):
    """A rank's `call`-th send has its source ready (snapshot taken, or live weights held still)."""

    call: int
    version: int
    metadata: bytes = b""


class Waiting(_Message, frozen=True):
    """A rank has begun `call` and finds no free snapshot."""

    call: int


class WithdrawCall(_Message, frozen=True):
    """The application cancelled the send with this call number; the number is burnt if not yet announced."""

    call: int


class AbortTicket(_Message, frozen=True):
    """The application aborts an announced ticket everywhere."""

    ticket: int
    reason: str


# Coordinator -> trainer ranks (and leaders) --------------------------------------------------------


class Announced(_Message, frozen=True):
    """All ranks have reported call `call`: it is `ticket`. To all ranks and all engine leaders."""

    ticket: int
    version: int
    call: int


class CallAborted(_Message, frozen=True):
    """This call number is burnt: `UpdateAborted`, `BarrierTimeout` if ranks are missing, or `ProtocolError`
    where they contradict each other. The reason names the ranks. Sent to each rank that has begun the call,
    and to one that begins it later."""

    call: int
    reason: str
    protocol_error: bool = False
    missing: tuple[str, ...] = ()


class TooLate(_Message, frozen=True):
    """Answer to `WithdrawCall`: already announced as `ticket`; the send only stops waiting."""

    call: int
    ticket: int


class Serve(_Message, frozen=True):
    """One serving set of `ticket`: to all ranks and, through their leaders, to all workers of `engines`.

    Only these are written. A rank may get several for one ticket, each with other engines; those that
    missed earlier tickets come first. It answers the engine's outstanding offer.
    """

    ticket: int
    version: int
    engines: tuple[str, ...]
    metadata: bytes = b""


class TicketAborted(_Message, frozen=True):
    """Void the grants of this ticket to `engines`. To all ranks, and to the leaders of these engines.

    A leader passes it to its workers, unless it has already sent a commit that can still complete: the
    engine decides as one. With `everywhere` the ticket itself has ended: a send that still waits for it
    raises `UpdateAborted`.
    """

    ticket: int
    engines: tuple[str, ...]
    reason: str
    everywhere: bool = False


class Overdue(_Message, frozen=True):
    """`update_timeout_s` has passed: `missing` were dropped for this ticket; a waiting send raises
    `BarrierTimeout`. To all ranks."""

    ticket: int
    missing: tuple[str, ...]
    reason: str


class Retired(_Message, frozen=True):
    """Each grant of this closed ticket has landed or aborted: its source may be reused after own flush."""

    ticket: int


class EngineOutcome(_Message, frozen=True):
    """What became of `ticket` on `engine`. To all ranks; exactly one is final for each engine of a ticket.

    Not final are `landed` (not committed yet) and `missed` (was not there when the ticket was first
    served; nobody waits for it, but until the ticket closes it can still be served).
    """

    ticket: int
    engine: str
    outcome: Outcome | Literal["landed"]
    final: bool


# Engine leader <-> coordinator ---------------------------------------------------------------------


class Offer(_Message, frozen=True):
    """All workers of this engine can take a whole version. `offer` is never reused.

    `parked`: while they stand still for it, so that it is refused at once if no ticket waits for this engine.
    Another one stands until one does.
    """

    offer: int
    parked: bool = False


class OfferRefused(_Message, frozen=True):
    """No ticket for this offer now (direct staging: release the parked workers)."""

    offer: int
    reason: str


class Landed(_Message, frozen=True):
    """All bytes of `ticket` have arrived at this engine (leader -> coordinator), or at this worker
    (worker -> leader).

    Not `whole`, from a worker only: as much has arrived as its ring takes before an apply begins.
    """

    ticket: int
    whole: bool = True


class Finished(_Message, frozen=True):
    """The engine's answer to a grant: applied, aborted (nothing written) or tainted."""

    ticket: int
    outcome: Literal["applied", "aborted", "tainted"]
    detail: str = ""


class WithdrawOffer(_Message, frozen=True):
    """The leader takes this offer back: answered by `OfferRefused`, unless a `Serve` is on its way."""

    offer: int


# Receiver <-> writer, on the data path -------------------------------------------------------------


class Credit(_Message, frozen=True):
    """The writer may put piece `piece` of `group` into `token` once. The receiver alone chooses `slot`.

    `in_place`: into the parameters themselves, whose placements have been told.
    """

    ticket: int
    group: int
    piece: int
    slot: int
    token: bytes
    nbytes: int
    in_place: bool = False


class Placement(msgspec.Struct, frozen=True, array_like=True):
    """A parameter in memory that its writers map: `offset` in bytes, of its first element."""

    parameter: str
    offset: int
    dtype: str


class Placed(_Message, frozen=True):
    """Credits are for these parameters themselves, not for slots. Comes before the first credit."""

    parameters: tuple[Placement, ...]


class Arrived(_Message, frozen=True):
    """The notification of a put: the bytes of this piece are in the slot. `checksum` 0 means none."""

    ticket: int
    group: int
    piece: int
    checksum: int = 0


class Stopped(_Message, frozen=True):
    """The writer has flushed and will write nothing more for `ticket` (or only for `group`, if >= 0)."""

    ticket: int
    group: int = -1


# Relay <-> receiver, on the data path ----------------------------------------------------------------


class Alive(_Message, frozen=True):
    """A sign of one that others wait for, or that waits itself: it has not stopped, just nothing moves."""

    ticket: int


class Unwanted(_Message, frozen=True):
    """Receiver -> relay: pass nothing more of `ticket` on to this worker, and say that you have stopped."""

    ticket: int


# Lockstep: leader <-> workers of one engine --------------------------------------------------------


class Vacant(_Message, frozen=True):
    """Worker -> leader: all slots of the ring are free; `grants` counts the grants that have ended here.

    `parked`: this worker takes versions only while its engine stands still. It says so once.
    """

    grants: int
    parked: bool = False


class Hold(_Message, frozen=True):
    hold: int


class Promise(_Message, frozen=True):
    """Worker -> leader, at once: `index` of its next poll, which it will not pass before the answer."""

    hold: int
    index: int


class Meet(_Message, frozen=True):
    """Leader -> workers: polls below `index` return None; park there."""

    hold: int
    index: int


class Ready(_Message, frozen=True):
    """Parked at the index, `before_apply` has run."""

    hold: int


class Refuse(_Message, frozen=True):
    """`before_apply` refused."""

    hold: int
    reason: str


class WithdrawHold(_Message, frozen=True):
    """A parked poll was cancelled or has waited too long; it stays parked until the answer."""

    hold: int
    reason: str


class Commit(_Message, frozen=True):
    """All workers are ready: apply `ticket` now, whatever happens. `lag` newer ones have been announced."""

    hold: int
    ticket: int
    version: int
    lag: int = 0


class WorkerApplied(_Message, frozen=True):
    hold: int
    outcome: Literal["applied", "aborted", "tainted"]
    detail: str = ""


class Done(_Message, frozen=True):
    """All have answered: leave the poll. `outcome` is the engine's."""

    hold: int
    outcome: Literal["applied", "aborted", "tainted"]


class Release(_Message, frozen=True):
    """The hold ends without a commit. `protocol_error`: the polls of this engine can not be lined up."""

    hold: int
    reason: str
    protocol_error: bool = False
