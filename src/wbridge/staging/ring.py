"""ReceiverRing: a ring's memory with the compiled copies from it into the parameters."""

from __future__ import annotations

from collections.abc import Sequence

from wbridge.device.base import Device, Event, MemoryKind
from wbridge.device.copy import CopyPlan, Tensors, build_scatter, scatter
from wbridge.plan.types import Group
from wbridge.staging.blocks import iter_target_blocks
from wbridge.staging.slots import RingMemory


class ReceiverRing:
    """What both receiver stagings share. Which slot is free is known by `flow`, not here."""

    def __init__(
        self,
        device: Device,
        kind: MemoryKind,
        targets: Tensors,
        groups: Sequence[Group],
        *,
        num_slots: int,
        shared: bool = True,
    ) -> None:
        largest = max((group.nbytes for group in groups), default=0)
        self.memory: RingMemory = RingMemory(
            device, kind, num_slots=num_slots, slot_nbytes=largest, shared=shared
        )
        self._stream = device.open_stream("apply")
        self._targets, self._groups = targets, groups
        self.rebind()

    def rebind(self) -> None:
        """Compile the copies for the targets where they are now. No copy is under way."""
        self._copies: dict[int, CopyPlan] = {
            group.index: build_scatter(iter_target_blocks(group), self._targets) for group in self._groups
        }

    def scatter(self, group: Group, slot: int, after: Event | None) -> Event:
        if after is not None:
            self._stream.wait_event(after)
        buffer, start = self.memory.place(slot)
        return scatter(self._stream, self._copies[group.index], buffer, start)

    def close(self) -> None:
        self._stream.close()

    def replace(self, slot: int) -> None:
        for copies in self._copies.values():
            copies.forget(self.memory.place(slot).buffer)
        self.memory.replace(slot)
