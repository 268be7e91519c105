"""Frozen settings with defaults, units and validation; plain values that read nothing."""

from __future__ import annotations

import enum
import re
from typing import Literal

import msgspec

from wbridge.errors import ConfigError

Staging = Literal["direct", "pinned"]
Delivery = Literal["every", "latest"]

_NIC = r"[0-9.]+(/[0-9.]+)?"
_HOST_NICS = re.compile(rf"[^=]+={_NIC}(\+{_NIC})*")


class Mode(enum.Enum):
    """Where slots live on the two sides, hence what stalls for what."""

    SYNC = "sync"
    SENDER_OVERLAP = "sender_overlap"
    RECEIVER_OVERLAP = "receiver_overlap"
    ASYNC = "async"

    @property
    def sender_staging(self) -> Staging:
        return "pinned" if self in (Mode.SENDER_OVERLAP, Mode.ASYNC) else "direct"

    @property
    def receiver_staging(self) -> Staging:
        return "pinned" if self in (Mode.RECEIVER_OVERLAP, Mode.ASYNC) else "direct"


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of one worker. Job-wide ones must agree: the coordinator's value is used by all.

    Raises:
        ConfigError: a value is out of range; the message names the setting and the remedy.
    """

    # Job-wide: the coordinator's values travel in the handshake.
    mode: Mode = Mode.SYNC
    """Which sides let bytes wait in host memory: `sync`, `sender_overlap`, `receiver_overlap` or `async`."""
    delivery: Literal["auto", "every", "latest"] = "auto"
    """`auto` is `every` in `sync`, else `latest`."""
    num_engines: int = 1
    """The first epoch starts when the trainer group and this many engines are complete."""
    slot_nbytes: int = 64 * 2**20
    """The size of one slot of a ring in bytes; a tensor larger than a slot is split."""
    num_slots: int = 0
    """Slots of a receiver's ring; 0 means automatic: a whole version when pinned, else 4."""
    snapshot_versions: int = 2
    """Snapshots that a trainer with pinned staging keeps, each the size of its shard."""
    checksum: Literal["auto", "on", "off"] = "auto"
    """`auto` is on between hosts."""
    relays: Literal["auto", "off"] = "auto"
    """`auto`: rollouts of other hosts than the trainers' pass weights on to each other where that lowers the
    load of the busiest link; `off`: trainers send everything themselves."""
    topology: tuple[str, ...] = ()
    """Bandwidths of hosts in GB/s, `HOST=EGRESS/INGRESS`, or `HOST=BOTH`, with a `+` between several NICs:
    `node1=25+25`. Hosts are named as by `host`; all others count as equal, with one NIC of 1 GB/s."""
    max_poll_skew: int = 64
    """Poll indices of one engine's workers may differ by at most this many."""

    # Deadlines in seconds.
    connect_timeout_s: float = 120.0
    """How long `connect` waits for the coordinator and the other workers."""
    update_timeout_s: float = 300.0
    """How long `send_weights` waits for the other ranks to call it and, with `every`, for all engines."""
    hold_timeout_s: float = 60.0
    """How long a parked engine waits for its last worker before it is released."""
    relay_patience_s: float = 1.0
    """With `latest`, how long a ticket waits for engines that hold no other and have not offered yet. And how
    long a rollout waits for a sign of one that is to pass weights on before it takes them from the trainers,
    if the link is not slow."""
    fence_timeout_s: float = 30.0
    """How long a slot waits for proof that its writer has stopped before other memory replaces it."""
    coordinator_timeout_s: float = 30.0
    """How long `send_weights` waits for a lost coordinator to come back."""
    close_timeout_s: float = 10.0
    """How long leaving the job may take; what is left then is cut."""
    heartbeat_s: float = 5.0
    """A lease is renewed this often; after three missed renewals a peer counts as lost."""

    # Of this worker alone.
    coordinator: Literal["embedded", "external"] = "embedded"
    """`embedded`: trainer rank 0 runs it; `external`: `wbridge coordinator` does."""
    transport: Literal["auto", "loopback", "shared_memory", "ucxx"] = "auto"
    """`auto` is `loopback` inside one process, `shared_memory` inside one host, else `ucxx`."""
    include: tuple[str, ...] = ()
    """Shell-style patterns of checkpoint tensors that are synchronised; empty means all."""
    allow_unfed: tuple[str, ...] = ()
    """Shell-style patterns of parameters that may keep elements which no checkpoint tensor feeds."""
    cache_dir: str = ""
    """Where source maps and plans are kept between runs; empty turns the cache off."""
    verify: Literal["sample", "full", "off"] = "sample"
    """How much of the source map is replayed against a real `load_weights` at connect."""
    local_slots: int = 2
    """Slots in which a sender gathers, for each receiver into whose memory it cannot; each as large as the
    largest piece for that receiver."""
    debug_source: bool = False
    """For debugging: `send_weights` digests the weights twice and raises if they changed meanwhile."""
    copy_threads: int = 0
    """Threads of one copy between parameters and slots in host memory; 0 means the cores, at most 4. Workers
    that share a host should divide its cores among them."""
    host: str = ""
    """Overrides the host identity: workers with the same one are taken to share memory."""

    def __post_init__(self) -> None:
        for name in ("num_engines", "slot_nbytes", "snapshot_versions", "max_poll_skew", "local_slots"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be at least 1")
        for name in ("num_slots", "copy_threads"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be positive, or 0 for automatic")
        for entry in self.topology:
            if not _HOST_NICS.fullmatch(entry):
                raise ConfigError(
                    f"topology = {entry!r}: write HOST=EGRESS/INGRESS in GB/s, or HOST=BOTH, with a + between"
                    " several NICs"
                )
        for name in self.__struct_fields__:
            if name.endswith("_s") and getattr(self, name) <= 0:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be a positive number of seconds")

    @property
    def source_held(self) -> bool:
        """Direct sender staging: a send returns only when nobody reads the live weights any more."""
        return self.mode.sender_staging == "direct"

    @property
    def lands_when_parked(self) -> bool:
        """Direct receiver staging: no engine has a version before its workers stand still for it."""
        return self.mode.receiver_staging == "direct"

    def takes_parked(self, num_groups: int) -> bool:
        """Whether a rollout that gets so many groups of a version takes it only while its engine stands
        still: with direct staging, unless it takes each version and all of it comes at once."""
        return self.lands_when_parked and (num_groups > 1 or self.effective_delivery == "latest")

    @property
    def effective_delivery(self) -> Delivery:
        if self.delivery == "auto":
            return "every" if self.mode is Mode.SYNC else "latest"
        return self.delivery


JOB_WIDE: tuple[str, ...] = (
    "mode",
    "delivery",
    "num_engines",
    "slot_nbytes",
    "num_slots",
    "snapshot_versions",
    "checksum",
    "relays",
    "topology",
    "max_poll_skew",
)
"""Settings for which the coordinator's value is authoritative."""
