"""Direct staging: no copy of the weights besides the slots themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from wbridge.device.base import Buffer, Device, Event, MemoryKind, PeerMemory
from wbridge.device.copy import Tensors
from wbridge.device.runs import Runs
from wbridge.flow.messages import Placement
from wbridge.plan.types import Group, Piece
from wbridge.staging.gathering import Gathering
from wbridge.staging.ring import ReceiverRing
from wbridge.staging.slots import LocalSlots, Place


class DirectSender:
    """Gathers from the live parameters: the caller may not change them until the version is delivered."""

    def __init__(
        self, device: Device, parameters: Tensors, pieces: Sequence[Piece], *, local_slots: int
    ) -> None:
        self._device = device
        self._local_slots = local_slots
        self._gathering = Gathering(device.open_stream("gather"), pieces, parameters)

    @property
    def holds_live_weights(self) -> Literal[True]:
        return True

    @property
    def has_free_snapshot(self) -> Literal[True]:
        return True

    def snapshot_now(self, after: Event) -> LiveSource:
        """The gathers wait for `after`, not the caller."""
        self._gathering.stream.wait_event(after)
        return LiveSource(self._gathering)

    async def snapshot(self, after: Event) -> LiveSource:
        return self.snapshot_now(after)

    def open_slots(self, nbytes: int, *, on_gpu: bool = False) -> LocalSlots:
        kind: MemoryKind = "device" if on_gpu else "pinned"
        return LocalSlots(self._device, kind, num_slots=self._local_slots, slot_nbytes=nbytes)

    def adopt(self, memory: PeerMemory) -> Buffer:
        return self._device.adopt(memory)

    def close(self) -> None:
        self._gathering.stream.close()


class LiveSource:
    """The live parameters."""

    def __init__(self, gathering: Gathering) -> None:
        self._gathering = gathering

    def gather(self, piece: Piece, place: Place) -> Event:
        return self._gathering.start(piece, place)

    def gather_in_place(self, piece: Piece, buffer: Buffer, placements: Mapping[str, Placement]) -> Event:
        return self._gathering.start_in_place(piece, buffer, placements)

    def lend(self, piece: Piece, placements: Mapping[str, Placement]) -> tuple[Runs, Event] | None:
        runs = self._gathering.runs(piece, placements)
        return None if runs is None else (runs, self._gathering.stream.record())

    def release(self) -> None:
        return


class DirectReceiver:
    """A small ring: a version passes through it while the engine is parked, or waits in it if that takes
    no more than one slot.

    It lies where the parameters do if all that write it can reach it there, else in host memory.
    `shared`: see `RingMemory`.
    """

    def __init__(
        self,
        device: Device,
        targets: Tensors,
        groups: Sequence[Group],
        *,
        num_slots: int,
        takes_parked: bool,
        kind: MemoryKind = "device",
        shared: bool = True,
    ) -> None:
        self._takes_parked = takes_parked
        self._ring = ReceiverRing(device, kind, targets, groups, num_slots=num_slots, shared=shared)

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
    def takes_parked(self) -> bool:
        return self._takes_parked

    @property
    def abandoned_nbytes(self) -> int:
        return self._ring.memory.abandoned_nbytes

    def groups_before_hold(self, num_groups: int) -> int:
        return 0 if self._takes_parked else num_groups

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
