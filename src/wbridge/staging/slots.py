"""LocalSlots, RingMemory: the buffers in which a sender gathers and into which a receiver is written."""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

import anyio

from wbridge.device.base import Buffer, Device, MemoryKind
from wbridge.errors import InternalError

_ALIGNMENT: Final = 4096


class Place(NamedTuple):
    """Where a piece is gathered."""

    buffer: Buffer
    offset: int


class LocalSlot:
    """One buffer of a sender. Compared by identity."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer

    @property
    def place(self) -> Place:
        return Place(self.buffer, 0)

    def view(self, nbytes: int) -> memoryview:
        """The `addresses` of the first `nbytes`, for the transport."""
        return self.buffer.addresses[:nbytes]


class LocalSlots:
    """A fixed set of slots, handed out in the order of asking; in memory that a transport reads."""

    def __init__(self, device: Device, kind: MemoryKind, *, num_slots: int, slot_nbytes: int) -> None:
        self._slots = [LocalSlot(device.allocate(slot_nbytes, kind)) for _ in range(num_slots)]
        self._free = deque(self._slots)
        self._available = anyio.Semaphore(num_slots, fast_acquire=True)

    async def acquire(self) -> LocalSlot:
        """Wait for a free slot. Cancelled: takes none."""
        await self._available.acquire()
        return self._free.popleft()

    def release(self, slot: LocalSlot) -> None:
        if slot in self._free or slot not in self._slots:
            raise InternalError("a gather slot was released twice, or to the wrong pool")
        self._free.append(slot)
        self._available.release()


class RingMemory:
    """The slots of a receiver's ring, all of one size and in one buffer, but for those that were replaced.

    `shared`: some writers open the buffer. To others it is the transport's.
    """

    def __init__(
        self, device: Device, kind: MemoryKind, *, num_slots: int, slot_nbytes: int, shared: bool
    ) -> None:
        self._device = device
        self._kind = kind
        self._shared = shared
        self._slot_nbytes = slot_nbytes
        stride = -(-slot_nbytes // _ALIGNMENT) * _ALIGNMENT
        arena = device.allocate(num_slots * stride, kind, shared=shared)
        self._places = [Place(arena, slot * stride) for slot in range(num_slots)]
        self._abandoned: list[Place] = []

    @property
    def num_slots(self) -> int:
        return len(self._places)

    @property
    def slot_nbytes(self) -> int:
        return self._slot_nbytes

    @property
    def abandoned_nbytes(self) -> int:
        return self._slot_nbytes * len(self._abandoned)

    @property
    def buffers(self) -> list[Buffer]:
        """All memory that slots lie in, or lay in when a writer was late; each once."""
        places = self._places + self._abandoned
        return list({id(place.buffer): place.buffer for place in places}.values())

    def place(self, slot: int) -> Place:
        return self._places[slot]

    def view(self, slot: int, offset: int, nbytes: int) -> memoryview:
        if not 0 <= offset <= offset + nbytes <= self._slot_nbytes:
            raise InternalError(f"bytes {offset} + {nbytes} are not in a slot of {self._slot_nbytes}")
        buffer, start = self._places[slot]
        return buffer.addresses[start + offset : start + offset + nbytes]

    def replace(self, slot: int) -> None:
        """Keep the old memory mapped for a writer that may come late."""
        self._abandoned.append(self._places[slot])
        self._places[slot] = Place(
            self._device.allocate(self._slot_nbytes, self._kind, shared=self._shared), 0
        )
