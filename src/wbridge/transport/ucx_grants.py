"""The receiver's side of one-sided puts: what it registered, and which slots which writer may still write."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from wbridge.device.base import Buffer
from wbridge.device.wakeup import Wakeup
from wbridge.errors import ProtocolError
from wbridge.transport.ucx_native import NativeUcxWorker

_GRANT: Final = struct.Struct("<QIQQ")


class Grant(NamedTuple):
    """The right to write one slot once, of one connection only; it is the slot's token."""

    connection: int
    region: int
    offset: int
    serial: int

    def encode(self) -> bytes:
        return _GRANT.pack(*self)


def decode_grant(token: bytes) -> Grant | None:
    """None: the token is of a slot whose bytes come as a message."""
    return Grant(*_GRANT.unpack(token)) if len(token) == _GRANT.size else None


class Registered(NamedTuple):
    """Memory that writers reach: its number, where it lies, and the key to it."""

    number: int
    address: int
    nbytes: int
    key: bytes
    buffer: Buffer


class Place(NamedTuple):
    """Where exposed memory lies: in which region, and where there."""

    region: int
    offset: int
    is_host: bool


class Regions:
    """Buffers by number, which is never used again; registered with UCX at the first need."""

    def __init__(self, worker: NativeUcxWorker, *, has_gpu: bool) -> None:
        """Without `has_gpu` only buffers of the host's memory."""
        self._worker = worker
        self._has_gpu = has_gpu
        self._buffers: list[Buffer] = []
        self._registered: dict[int, Registered] = {}
        self._is_needed = False

    def __iter__(self) -> Iterator[Registered]:
        return iter(list(self._registered.values()))

    def need(self) -> None:
        """A writer is there: register what is known, and from now on what comes."""
        if not self._is_needed:
            known = [region.buffer for region in self]  # if it failed midway before
            for buffer in self._buffers:
                if not any(buffer is one for one in known):
                    self._register(buffer)
            self._is_needed = True

    def add(self, buffer: Buffer) -> Registered | None:
        """None: it is known already, no writer is there yet, or UCX does not reach it."""
        is_reached = buffer.nbytes and (buffer.is_host or self._has_gpu)
        if not is_reached or any(buffer is known for known in self._buffers):
            return None
        region = self._register(buffer) if self._is_needed else None  # first: it may fail
        self._buffers.append(buffer)
        return region

    def remove(self, buffer: Buffer) -> int | None:
        """Return the number that it had, if it had one."""
        self._buffers = [known for known in self._buffers if known is not buffer]
        for region in self:
            if region.buffer is buffer:
                del self._registered[region.number]
                self._worker.unmap(region.number)
                return region.number
        return None

    def locate(self, memory: memoryview) -> Place | None:
        """None: it is in none of the regions."""
        if not memory.c_contiguous or memory.readonly or not memory.nbytes:
            return None
        start = address_of(memory)
        for region in self._registered.values():
            if region.address <= start <= start + memory.nbytes <= region.address + region.nbytes:
                return Place(region.number, start - region.address, region.buffer.is_host)
        return None

    def is_on_gpu(self, number: int) -> bool:
        """Whether this region, if it is one still, is not the host's."""
        region = self._registered.get(number)
        return region is not None and not region.buffer.is_host

    def _register(self, buffer: Buffer) -> Registered:
        number, key = self._worker.map(buffer.addresses, "host" if buffer.is_host else "cuda")
        region = Registered(number, address_of(buffer.addresses), buffer.nbytes, key, buffer)
        self._registered[number] = region
        return region


class Grants:
    """What one connection may still write.

    Nobody here can stop a put that was granted. So a slot comes back when its writer says that it is over,
    or has closed, or has died.
    """

    def __init__(self, connection: int, revoke: Callable[[bytes], None]) -> None:
        self._connection = connection
        self._revoke = revoke
        self._open: dict[Grant, list[Wakeup]] = {}
        self._next = 1
        self._is_out_of_reach = False

    @property
    def num_open(self) -> int:
        return len(self._open)

    def give(self, region: int, offset: int) -> Grant:
        grant = Grant(self._connection, region, offset, self._next)
        self._next += 1
        self._open[grant] = []
        return grant

    def settle(self, grant: Grant) -> bool:
        """The writer is done with the slot. False: that was known."""
        waiters = self._open.pop(grant, None)
        for wakeup in waiters or ():
            wakeup.set()
        return waiters is not None

    async def withdraw(self, grant: Grant) -> bool:
        """Ask the writer and wait for its answer. Cancelled: it has been asked all the same.

        False: it is out of reach.
        """
        if grant in self._open and not self._is_out_of_reach:
            await self._ask(grant).wait()
        return grant not in self._open

    async def withdraw_all(self) -> None:
        """Return when nothing may be written any more, or the writer is out of reach. Cancelled: as above."""
        if not self._is_out_of_reach:
            for answer in [self._ask(grant) for grant in self._open]:
                await answer.wait()

    def end(self) -> None:
        """The writer has closed or died: nothing is written any more."""
        for grant in list(self._open):
            self.settle(grant)

    def doubt(self) -> None:
        """The writer is out of reach: what is open it may write still."""
        self._is_out_of_reach = True
        for waiters in self._open.values():
            for wakeup in waiters:
                wakeup.set()

    def _ask(self, grant: Grant) -> Wakeup:
        waiters = self._open[grant]
        if not waiters:
            self._revoke(grant.encode())
        waiters.append(Wakeup())
        return waiters[-1]


def address_of(memory: memoryview) -> int:
    if memory.readonly:
        raise ProtocolError("memory that peers write must be writable; register a buffer")
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
