"""Relay staging: verified pieces in the slots of a ring, to be copied to where other workers get them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from wbridge.device.base import Buffer, Device, Event, PeerMemory
from wbridge.device.memory import move
from wbridge.device.runs import Runs
from wbridge.errors import InternalError
from wbridge.flow.messages import Placement
from wbridge.plan.types import Piece
from wbridge.staging.slots import LocalSlots, Place


class RelayStaging:
    """The copies of a relay, in a stream of their own: its apply does not wait for them."""

    def __init__(self, device: Device, *, local_slots: int) -> None:
        self._device = device
        self._local_slots = local_slots
        self._stream = device.open_stream("relay", on_host=True)

    def open_slots(self, nbytes: int) -> LocalSlots:
        """See `SenderStaging.open_slots`."""
        return LocalSlots(self._device, "pinned", num_slots=self._local_slots, slot_nbytes=nbytes)

    def open_source(self, reading: Callable[[Piece, Event], None]) -> KeptPieces:
        """`reading` is called with each piece when it begins to be copied, and the event of that copy."""
        return KeptPieces(self, reading)

    def copy(self, place: Place, kept: memoryview) -> Event:
        """Start to copy; host memory only."""
        target = place.buffer.view[place.offset : place.offset + kept.nbytes]
        self._stream.submit(functools.partial(move, target, kept))
        return self._stream.record()

    def adopt(self, memory: PeerMemory) -> Buffer:
        return self._device.adopt(memory)

    def close(self) -> None:
        self._stream.close()


class KeptPieces:
    """The pieces of one ticket that are kept for others. A piece is known by identity."""

    def __init__(self, staging: RelayStaging, reading: Callable[[Piece, Event], None]) -> None:
        self._staging = staging
        self._reading = reading
        self._kept: dict[int, memoryview] = {}

    def add(self, piece: Piece, kept: memoryview) -> None:
        """`kept` holds the bytes of `piece`, until its copy is over or it is not asked for any more."""
        self._kept[id(piece)] = kept

    def gather(self, piece: Piece, place: Place) -> Event:
        event = self._staging.copy(place, self._kept[id(piece)])
        self._reading(piece, event)
        return event

    def gather_in_place(self, piece: Piece, buffer: Buffer, placements: Mapping[str, Placement]) -> Event:
        raise InternalError("a relay was asked to write parameters directly; please report it")

    def lend(self, piece: Piece, placements: Mapping[str, Placement]) -> tuple[Runs, Event] | None:
        return None

    def release(self) -> None:
        self._kept.clear()
