"""Every control frame, in the order in which a worker meets them: handshake, membership, epoch, status.

All are plain msgspec structs tagged by class name; nothing that arrives is ever unpickled or run.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from wbridge.flow import messages as flow
from wbridge.flow.standings import EngineStatus
from wbridge.ids import Epoch, WorkerId

PROTOCOL_VERSION = 1
"""Both ends must have the same one. `Challenge` and `Rejected` keep their shape in every version."""

Value: TypeAlias = str | int | float | bool | tuple[str, ...]
"""A setting on the wire: what `msgspec.to_builtins` makes of it."""


class _Frame(msgspec.Struct, frozen=True, tag_field="kind"):
    """Base of all control frames: frozen and tagged by class name."""


# Authentication, on every connection ---------------------------------------------------------------


class Challenge(_Frame, frozen=True):
    """The listening side speaks first."""

    nonce: bytes
    protocol_version: int
    wbridge_version: str


class Proof(_Frame, frozen=True):
    """The connecting side shows that it knows the secret, and asks the same of the other."""

    nonce: bytes
    protocol_version: int
    wbridge_version: str
    hmac: bytes


class Accepted(_Frame, frozen=True):
    """The listening side shows that it knows the secret as well."""

    hmac: bytes


class Rejected(_Frame, frozen=True):
    """The peer ends the connection; `error` is a class of `wbridge.errors`. `receive` raises it."""

    error: str
    message: str
    missing: tuple[str, ...] = ()


class Introduce(_Frame, frozen=True):
    """First frame on an engine-local connection: who calls, and in which epoch."""

    worker: WorkerId
    epoch: Epoch


class Follow(_Frame, frozen=True):
    """Leader -> workers of its engine: nothing of the old membership is under way, go into this epoch."""

    epoch: Epoch


# Worker <-> coordinator ----------------------------------------------------------------------------


class Committed(_Frame, frozen=True):
    """What a worker that comes back holds: the ticket and version committed last, in which epoch."""

    epoch: Epoch
    ticket: int
    version: int


class Hello(_Frame, frozen=True):
    """Who joins. `explicit` maps each setting that the user set to (value, origin)."""

    worker: WorkerId
    host: str
    adapter_token: str
    explicit: dict[str, tuple[Value, str]]
    committed: Committed | None = None


class Welcome(_Frame, frozen=True):
    """The worker is a member. `job` holds the values of the job-wide settings, to be adopted."""

    incarnation: int
    job: dict[str, Value]
    heartbeat_s: float


class Join(_Frame, frozen=True):
    """The worker can be planned for. `table` is a msgpack-encoded `MapTable`.

    If no epoch has started with it after `patience_s`, the worker is told who was missing; 0 means the
    coordinator's `connect_timeout_s`.
    """

    table: bytes
    transport_address: bytes
    lockstep_address: str = ""
    patience_s: float = 0.0


class Peer(msgspec.Struct, frozen=True):
    """How to reach one worker of the epoch."""

    worker: WorkerId
    transport_address: bytes
    host: str
    adapter_token: str
    lockstep_address: str


class EpochStart(_Frame, frozen=True):
    """Drop the old epoch and open this one. `plan` is that of all workers, as `planning.packed`; `job`
    holds the job-wide settings from here on, as in `Welcome`, `standings` what the engines come with."""

    epoch: Epoch
    plan: bytes
    peers: tuple[Peer, ...]
    engines: tuple[str, ...]
    ranks: tuple[WorkerId, ...]
    job: dict[str, Value] = {}
    standings: tuple[EngineStatus, ...] = ()


class EpochReady(_Frame, frozen=True):
    """This worker's endpoints are open, its memory registered and its rings allocated.

    `num_calls`: the sends that it has begun, counted on from what the first `EpochLive` told it.
    """

    epoch: Epoch
    num_calls: int | None = None


class EpochLive(_Frame, frozen=True):
    """Every worker of the epoch is ready: flow messages may be sent.

    `num_calls`: the sends that some trainer rank has begun before; those are over for all ranks.
    """

    epoch: Epoch
    num_calls: int = 0


class Reconfigure(_Frame, frozen=True):
    """A trainer rank asks for other job-wide settings, and waits `patience_s` for the others to ask for the
    same. Without values it takes that back. `call` numbers what it asks."""

    call: int
    values: dict[str, Value]
    patience_s: float = 0.0


class Reconfigured(_Frame, frozen=True):
    """The answer to a rank's `Reconfigure` number `call`: an epoch with those settings is live; or the class
    of an error."""

    call: int
    error: str = ""
    message: str = ""
    missing: tuple[str, ...] = ()


class WorkerLost(_Frame, frozen=True):
    """A member is gone; an engine without one of its workers is lost as a whole."""

    worker: WorkerId
    reason: str


class Heartbeat(_Frame, frozen=True):
    """Renews the lease of an idle connection, in both directions."""


class Bye(_Frame, frozen=True):
    """This side leaves on purpose."""


# Anybody -> coordinator ----------------------------------------------------------------------------


class StatusRequest(_Frame, frozen=True):
    """Answered with one `StatusReply`; needs no `Hello`."""


class MemberStatus(msgspec.Struct, frozen=True):
    worker: WorkerId
    remote: str
    host: str
    joined: bool


class StatusReply(_Frame, frozen=True):
    """What `wbridge status` shows. `waiting_for` names whom the current phase waits for."""

    epoch: Epoch | None
    phase: Literal["forming", "planning", "opening", "live", "ending"]
    members: tuple[MemberStatus, ...]
    engines: tuple[EngineStatus, ...]
    announced: int | None
    waiting_for: tuple[str, ...]


# Verification, in `Keyed` frames: trainer ranks and rollout workers <-> coordinator -----------------

Sums: TypeAlias = dict[str, dict[str, int]]
"""For each receiver and checkpoint tensor, the sum of its elements' digests, mod 2^64."""

CheckOutcome = Literal["equal", "different", "unverifiable", "other_version", "tainted", "lost"]


class Verify(_Frame, frozen=True):
    """A rank's digests of what it would send now. `version` is the last that it published."""

    call: int
    version: int | None
    sums: Sums


class WithdrawVerify(_Frame, frozen=True):
    """A rank no longer asks; without effect once all have asked."""

    call: int


class TakeDigest(_Frame, frozen=True):
    """Coordinator -> every rollout worker: all ranks have asked."""

    round: int


class Unverifiable(msgspec.Struct, frozen=True):
    """A checkpoint tensor that a worker cannot be compared for."""

    worker: WorkerId
    tensor: str
    reason: str


class Digested(_Frame, frozen=True):
    """A rollout worker's digests of its live parameters, or why there are none."""

    round: int
    version: int | None
    sums: dict[str, int] = {}
    unverifiable: tuple[Unverifiable, ...] = ()
    failed: str = ""
    is_tainted: bool = False


class Difference(msgspec.Struct, frozen=True):
    """A checkpoint tensor whose elements on a worker are not those that the trainers hold."""

    worker: WorkerId
    tensor: str


class EngineCheck(msgspec.Struct, frozen=True):
    """What `verify()` found on one engine.

    `unverifiable`: all that can be compared is equal, but not everything can be, or nothing, for `reason`.
    """

    engine: str
    outcome: CheckOutcome
    version: int | None = None
    reason: str = ""
    different: tuple[Difference, ...] = ()
    unverifiable: tuple[Unverifiable, ...] = ()


class Verification(msgspec.Struct, frozen=True):
    """The result of `verify()`: `version` is the trainer's last, compared with every engine."""

    version: int | None
    engines: tuple[EngineCheck, ...]

    @property
    def equal(self) -> bool:
        """Every engine holds this version, and everything on it is as the trainers have it."""
        return all(engine.outcome == "equal" for engine in self.engines)


class Verified(_Frame, frozen=True):
    """The answer to a rank's `Verify` number `call`; or the class of an error, and no result."""

    call: int
    result: Verification | None
    error: str = ""
    message: str = ""
    missing: tuple[str, ...] = ()


# The frame around the update protocol --------------------------------------------------------------

FlowMessage: TypeAlias = (
    flow.Report
    | flow.Waiting
    | flow.WithdrawCall
    | flow.AbortTicket
    | flow.Announced
    | flow.CallAborted
    | flow.TooLate
    | flow.Serve
    | flow.TicketAborted
    | flow.Overdue
    | flow.Retired
    | flow.EngineOutcome
    | flow.Offer
    | flow.OfferRefused
    | flow.WithdrawOffer
    | flow.Landed
    | flow.Finished
    | flow.Vacant
    | flow.Hold
    | flow.Promise
    | flow.Meet
    | flow.Ready
    | flow.Refuse
    | flow.WithdrawHold
    | flow.Commit
    | flow.WorkerApplied
    | flow.Done
    | flow.Release
    | Verify
    | WithdrawVerify
    | TakeDigest
    | Digested
    | Verified
)


class Keyed(_Frame, frozen=True):
    """A message of the update protocol with its epoch; a receiver drops one of another epoch."""

    epoch: Epoch
    message: FlowMessage


Message: TypeAlias = (
    Challenge
    | Proof
    | Accepted
    | Rejected
    | Introduce
    | Follow
    | Hello
    | Welcome
    | Join
    | EpochStart
    | EpochReady
    | EpochLive
    | Reconfigure
    | Reconfigured
    | WorkerLost
    | Heartbeat
    | Bye
    | StatusRequest
    | StatusReply
    | Keyed
)
