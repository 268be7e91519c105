"""Pinned staging: whole versions in host memory, so that neither side waits for the other."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import anyio

from wbridge.device.base import Buffer, Device, Event, PeerMemory, Stream
from wbridge.device.copy import Tensors
from wbridge.device.cpu import DoneEvent
from wbridge.device.mirror import Mirror
from wbridge.device.runs import Runs
from wbridge.errors import InternalError
from wbridge.flow.messages import Placement
from wbridge.plan.types import Group, Piece
from wbridge.staging.gathering import Gathering
from wbridge.staging.ring import ReceiverRing
from wbridge.staging.slots import LocalSlots, Place


class PinnedSender:
    """Copies the parameters that it has to send into one of `snapshot_versions` host copies."""

    def __init__(
        self,
        device: Device,
        parameters: Tensors,
        pieces: Sequence[Piece],
        *,
        local_slots: int,
        snapshot_versions: int,
    ) -> None:
        names = {transfer.source_parameter for piece in pieces for transfer in piece.transfers}
        # The trainer has gone on. The snapshots are in host memory, as most slots are.
        self._gathers = device.open_stream("gather", background=True, on_host=True)
        self._device_gathers = device.open_stream("gather to a device", background=True)
        self._stream = device.open_stream("snapshot")
        self._device = device
        self._local_slots = local_slots
        mirrors = [Mirror(device, parameters, names) for _ in range(snapshot_versions)]
        self._versions = [
            _Version(mirror, pieces, host=self._gathers, device=self._device_gathers) for mirror in mirrors
        ]
        self._free = deque(self._versions)
        self._compiling = threading.Lock()
        self._available = anyio.Semaphore(snapshot_versions, fast_acquire=True)

    @property
    def holds_live_weights(self) -> Literal[False]:
        return False

    @property
    def has_free_snapshot(self) -> bool:
        return bool(self._free)

    def snapshot_now(self, after: Event) -> None:
        """The copy takes its time."""

    async def snapshot(self, after: Event) -> Snapshot:
        """Return when the copy is done. Cancelled: the copy is dropped and its memory free again."""
        await self._available.acquire()
        version = self._free.popleft()
        try:
            for event in version.last_gathers.values():
                await event.wait()
            self._stream.wait_event(after)
            await version.mirror.copy(self._stream).wait()
        except BaseException:
            self._give_back(version)
            raise
        return Snapshot(version, self._give_back)

    def open_slots(self, nbytes: int, *, on_gpu: bool = False) -> LocalSlots:
        """See `SenderStaging.open_slots`. Always host memory, where the snapshots are too."""
        return LocalSlots(self._device, "pinned", num_slots=self._local_slots, slot_nbytes=nbytes)

    def adopt(self, memory: PeerMemory) -> Buffer:
        """See `SenderStaging.adopt`. Takes long for the first memory that only the device reaches."""
        buffer = self._device.adopt(memory)
        with self._compiling:
            for version in self._versions:
                version.gathering_into(buffer)
        return buffer

    def close(self) -> None:
        self._stream.close()
        self._gathers.close()
        self._device_gathers.close()

    def _give_back(self, version: _Version) -> None:
        self._free.append(version)
        self._available.release()


class _Version:
    """The memory of one snapshot and the gathers from it: by the host, and by the device into slots that the
    host does not reach."""

    def __init__(self, mirror: Mirror, pieces: Sequence[Piece], *, host: Stream, device: Stream) -> None:
        self.mirror = mirror
        self._pieces = pieces
        self._device = device
        self.by_host = Gathering(host, pieces, mirror.tensors)
        self._by_device: Gathering | None = None
        self.last_gathers: dict[bool, Event] = {}

    def gathering_into(self, buffer: Buffer) -> Gathering:
        if buffer.is_host:
            return self.by_host
        if self._by_device is None:
            self._by_device = Gathering(self._device, self._pieces, self.mirror.on_device())
        return self._by_device


class Snapshot:
    """A host copy of one version, until `release`."""

    def __init__(self, version: _Version, give_back: Callable[[_Version], None]) -> None:
        self._version: _Version | None = version
        self._give_back = give_back

    def gather(self, piece: Piece, place: Place) -> Event:
        gathering = self._taken(piece).gathering_into(place.buffer)
        return self._note(gathering.start(piece, place), place.buffer)

    def gather_in_place(self, piece: Piece, buffer: Buffer, placements: Mapping[str, Placement]) -> Event:
        gathering = self._taken(piece).gathering_into(buffer)
        return self._note(gathering.start_in_place(piece, buffer, placements), buffer)

    def lend(self, piece: Piece, placements: Mapping[str, Placement]) -> tuple[Runs, Event] | None:
        runs = self._taken(piece).by_host.runs(piece, placements)
        return None if runs is None else (runs, DoneEvent())

    def _taken(self, piece: Piece) -> _Version:
        if self._version is None:
            raise InternalError(f"piece at byte {piece.offset} gathered from a snapshot after its release")
        return self._version

    def _note(self, event: Event, buffer: Buffer) -> Event:
        assert self._version is not None
        self._version.last_gathers[buffer.is_host] = event
        return event

    def release(self) -> None:
        version, self._version = self._version, None
        if version is not None:
            self._give_back(version)


class PinnedReceiver:
    """A host ring that takes versions while the engine works; by default it holds a whole one."""

    def __init__(self, device: Device, targets: Tensors, groups: Sequence[Group], *, num_slots: int) -> None:
        self._ring = ReceiverRing(device, "pinned", targets, groups, num_slots=num_slots)

    @property
    def num_slots(self) -> int:
        return self._ring.memory.num_slots

    @property
    def slot_nbytes(self) -> int:
        return self._ring.memory.slot_nbytes

    @property
    def buffers(self) -> list[Buffer]:
        return self._ring.memory.buffers

    @property
    def placements(self) -> None:
        return None

    @property
    def takes_parked(self) -> Literal[False]:
        return False

    @property
    def abandoned_nbytes(self) -> int:
        return self._ring.memory.abandoned_nbytes

    def groups_before_hold(self, num_groups: int) -> int:
        return min(num_groups, self.num_slots)

    def slot_view(self, slot: int, offset: int, nbytes: int) -> memoryview:
        return self._ring.memory.view(slot, offset, nbytes)

    def scatter(self, group: Group, slot: int, *, after: Event | None = None) -> Event:
        return self._ring.scatter(group, slot, after)

    def replace(self, slot: int) -> None:
        self._ring.replace(slot)

    def rebind(self) -> None:
        self._ring.rebind()

    def close(self) -> None:
        self._ring.close()
