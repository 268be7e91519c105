"""The staging contract: where a worker's slots live and what has to wait for what.

The four modes differ only in which `SenderStaging` and which `ReceiverStaging` a worker holds.
Both belong to the adapter's event loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from wbridge.device.base import Buffer, Event, PeerMemory
from wbridge.device.runs import Runs
from wbridge.flow.messages import Placement
from wbridge.plan.types import Group, Piece
from wbridge.staging.slots import LocalSlots, Place


class Source(Protocol):
    """The weights of one version, to gather pieces from: the live ones or a snapshot."""

    def gather(self, piece: Piece, place: Place) -> Event:
        """Start to copy `piece` to `place`; its bytes are there when the event is done."""
        ...

    def gather_in_place(self, piece: Piece, buffer: Buffer, placements: Mapping[str, Placement]) -> Event:
        """Start to copy `piece` into the receiver's parameters, which lie in `buffer`."""
        ...

    def lend(self, piece: Piece, placements: Mapping[str, Placement]) -> tuple[Runs, Event] | None:
        """Return what of the weights goes where in the receiver's memory, to be read once the event is done.

        None: the piece has to be gathered first.
        """
        ...

    def release(self) -> None:
        """No more `gather` will follow and no event of one is waited for. Idempotent."""
        ...


class WriterStaging(Protocol):
    """What a writer needs, whatever it writes: places to gather in."""

    def adopt(self, memory: PeerMemory) -> Buffer:
        """Return the memory of a receiver on this host as a buffer to gather in."""
        ...

    def close(self) -> None:
        """End the streams; copies that were started still finish. Idempotent."""
        ...


class SenderStaging(WriterStaging, Protocol):
    """How a sender gets hold of a version's weights, and of places to gather them in."""

    @property
    def holds_live_weights(self) -> bool:
        """True: a source reads the live parameters, so they may not change before the puts have stopped."""
        ...

    @property
    def has_free_snapshot(self) -> bool:
        """True: `snapshot` would not wait for a source to be released."""
        ...

    def snapshot_now(self, after: Event) -> Source | None:
        """Like `snapshot`, if nothing has to be waited for; else None."""
        ...

    async def snapshot(self, after: Event) -> Source:
        """Return the weights as they are once `after`, an event of the caller's stream, is done.

        Unless `holds_live_weights`, the parameters may change as soon as this returns; it may wait
        for an older source to be released. Cancelled: no source is taken.
        """
        ...

    def open_slots(self, nbytes: int, *, on_gpu: bool = False) -> LocalSlots:
        """Return slots of that size for one receiver, so that a slow one keeps no other waiting.

        `on_gpu`: the transport reads the memory of this worker's GPU too, and nobody reads the slots here.
        """
        ...


class ReceiverStaging(Protocol):
    """The memory of a receiver's ring, and the way from there into the parameters."""

    @property
    def num_slots(self) -> int: ...

    @property
    def slot_nbytes(self) -> int: ...

    @property
    def buffers(self) -> list[Buffer]:
        """The memory that slots lie in now, for the transport."""
        ...

    @property
    def placements(self) -> Mapping[str, Placement] | None:
        """Where the parameters lie that writers write directly. None: bytes pass through slots."""
        ...

    @property
    def takes_parked(self) -> bool:
        """True: the worker can take a version only while all its engine is parked in the poll."""
        ...

    @property
    def abandoned_nbytes(self) -> int:
        """Bytes of slots that were replaced because a late writer might still write them."""
        ...

    def groups_before_hold(self, num_groups: int) -> int:
        """Return how many groups of a version must have landed before the engine is worth holding."""
        ...

    def slot_view(self, slot: int, offset: int, nbytes: int) -> memoryview:
        """Return the `addresses` of a part of a slot for the transport."""
        ...

    def scatter(self, group: Group, slot: int, *, after: Event | None = None) -> Event:
        """Start to copy `group` from `slot` into the parameters, not before `after` is done.

        The slot may be written again when the event is done.
        """
        ...

    def replace(self, slot: int) -> None:
        """Abandon a slot's memory, which stays mapped, and give the slot new memory."""
        ...

    def rebind(self) -> None:
        """Take the parameters where they are now. No copy is under way.

        Raises:
            ConfigError: writers were told where they lie.
        """
        ...

    def close(self) -> None:
        """End the streams; copies that were started still finish. Idempotent."""
        ...
