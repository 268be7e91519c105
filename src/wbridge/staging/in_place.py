"""InPlaceReceiver: no slots, since writers of the same host write straight into the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from wbridge.device.base import Buffer, Event
from wbridge.device.copy import Tensors, dtype_of
from wbridge.device.cpu import DoneEvent
from wbridge.device.sharing import offset_in
from wbridge.errors import ConfigError, InternalError
from wbridge.flow.messages import Placement
from wbridge.plan.types import Group


class InPlaceReceiver:
    """Parameters that lie in `arena`, memory that the writers map. While they are written they are neither
    old nor new, so this serves only engines that take versions when parked.

    Each group has a slot of its own, which is its place in the parameters: it is free once nobody writes it.
    """

    def __init__(self, arena: Buffer, targets: Tensors, groups: Sequence[Group]) -> None:
        self._arena = arena
        self._targets = targets
        self._num_slots = max(1, len(groups))
        self._names = {t.target_parameter for g in groups for piece in g.pieces for t in piece.transfers}
        self._placements = {
            name: Placement(name, offset_in(arena, targets[name]), dtype_of(targets[name]))
            for name in self._names
        }
        self._addresses = {name: targets[name].data_ptr() for name in self._names}

    @property
    def num_slots(self) -> int:
        return self._num_slots

    @property
    def slot_nbytes(self) -> Literal[0]:
        return 0

    @property
    def buffers(self) -> list[Buffer]:
        return [self._arena]

    @property
    def placements(self) -> Mapping[str, Placement]:
        return self._placements

    @property
    def takes_parked(self) -> Literal[True]:
        return True

    @property
    def abandoned_nbytes(self) -> Literal[0]:
        return 0

    def groups_before_hold(self, num_groups: int) -> Literal[0]:
        return 0

    def slot_view(self, slot: int, offset: int, nbytes: int) -> memoryview:
        """All of the arena: where in it a piece goes is told by the placements."""
        return self._arena.addresses

    def scatter(self, group: Group, slot: int, *, after: Event | None = None) -> Event:
        return DoneEvent()  # it is there

    def replace(self, slot: int) -> None:
        raise InternalError("parameters cannot be replaced by other memory")

    def rebind(self) -> None:
        moved = sorted(n for n in self._names if self._targets[n].data_ptr() != self._addresses[n])
        if moved:
            raise ConfigError(
                f"{len(moved)} parameters, {moved[0]} first, have moved, and writers on this host write them "
                "where they were when connecting; close this adapter, and connect with a new one"
            )

    def close(self) -> None:
        return
