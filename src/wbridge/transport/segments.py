"""Segments: the shared memory that a worker lets its writers map."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import NamedTuple

from wbridge.device.base import Buffer
from wbridge.errors import ProtocolError


class Shared(NamedTuple):
    """One registered buffer."""

    number: int
    buffer: Buffer
    descriptor: int
    address: int


class Segments:
    """The registered buffers by number, which is never used again."""

    def __init__(self) -> None:
        self._shared: dict[int, Shared] = {}
        self._next = 1

    def __iter__(self) -> Iterator[Shared]:
        return iter(self._shared.values())

    def add(self, buffer: Buffer) -> Shared | None:
        """None: it is known already, or cannot be shared."""
        if buffer.descriptor is None or any(shared.buffer is buffer for shared in self):
            return None
        shared = Shared(self._next, buffer, buffer.descriptor, _address(buffer.addresses))
        self._next += 1
        self._shared[shared.number] = shared
        return shared

    def remove(self, buffer: Buffer) -> Shared | None:
        """None: it is not known."""
        found = next((shared for shared in self if shared.buffer is buffer), None)
        return self._shared.pop(found.number) if found is not None else None

    def locate(self, memory: memoryview, peer: str) -> tuple[int, int]:
        """Return the number of the segment and the offset in it.

        Raises:
            ProtocolError: the memory is in no registered buffer, or not contiguous.
        """
        if not memory.c_contiguous or memory.readonly:
            raise ProtocolError("exposed memory must be writable and contiguous; expose a slot's own view")
        if not memory.nbytes:
            return 0, 0
        start = _address(memory)
        for shared in self:
            if shared.address <= start <= start + memory.nbytes <= shared.address + shared.buffer.nbytes:
                return shared.number, start - shared.address
        raise ProtocolError(
            f"{memory.nbytes} bytes for {peer} are not in shared memory: register a buffer that was"
            " allocated as shared, or set transport='ucxx'"
        )


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
