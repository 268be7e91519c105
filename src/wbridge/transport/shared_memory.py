"""SharedMemoryTransport: between processes of one host, each writes straight into the other's slots."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import secrets
import socket
from types import TracebackType
from typing import Final, Self

import anyio
import msgspec

from wbridge.device.base import Buffer
from wbridge.errors import EndpointClosed, ProtocolError
from wbridge.transport.base import RemoteSlot
from wbridge.transport.counters import Counters
from wbridge.transport.exposure_table import NUM_ENTRIES, TABLE_NBYTES, ExposureTable
from wbridge.transport.host import is_ending
from wbridge.transport.inbox import Inbox
from wbridge.transport.segments import Segments, Shared
from wbridge.transport.unix_endpoint import SharedMemoryEndpoint
from wbridge.transport.unix_frames import (
    Notification,
    Segment,
    SegmentEnd,
    SlotToken,
    TableFrame,
    UnixAddress,
    decode_slot,
)
from wbridge.transport.unix_incoming import UnixIncoming

_BACKLOG: Final = 1024
_LAST_PAUSE_S: Final = 0.02
_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_ACCEPT_AGAIN_S: Final = 1.0

_log = logging.getLogger(__name__)


class SharedMemoryTransport:
    """Slots in memory that the receiver owns and its writers map; messages and notifications on unix sockets.

    Bytes arrive whatever the receiver does meanwhile. A slot is written under a lock that the kernel
    drops when the writer dies. Runs on the loop on which it is opened, without tasks of its own.
    """

    def __init__(self, name: str, *, inbox: Inbox | None = None) -> None:
        self._name = name
        self._inbox = inbox or Inbox(name)
        self._counters = Counters()
        self._segments = Segments()
        self._endpoints: set[SharedMemoryEndpoint] = set()
        self._incoming: set[UnixIncoming] = set()
        self._exposed: dict[int, int] = {}  # entry -> word
        self._writers: dict[int, str] = {}  # entry -> name
        self._pids: dict[str, set[int]] = {}  # of all who were ever let in, by name
        self._free = iter(range(NUM_ENTRIES))
        self._freed: list[int] = []
        self._own = UnixAddress(b"\0wbridge-" + secrets.token_hex(16).encode(), secrets.token_bytes(32))
        self._closed = True

    async def __aenter__(self) -> Self:
        self._memory = os.memfd_create("wbridge-table", os.MFD_CLOEXEC)
        os.ftruncate(self._memory, TABLE_NBYTES)
        self._table = ExposureTable(self._memory)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._socket.bind(self._own.name)
        self._socket.listen(_BACKLOG)
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    @property
    def name(self) -> str:
        return self._name

    @property
    def address(self) -> bytes:
        return msgspec.msgpack.encode(self._own)

    @property
    def inbox(self) -> Inbox:
        return self._inbox

    @property
    def counters(self) -> dict[str, int]:
        return self._counters.as_dict()

    async def connect(
        self, address: bytes, peer: str, counters: Counters | None = None
    ) -> SharedMemoryEndpoint:
        """Open an endpoint; `counters` replaces the transport's own.

        Raises:
            PeerLost: no transport of this host has that address any more.
            ProtocolError: the address is not of this kind.
            EndpointClosed: this transport is closed.
        """
        self._check_open()
        try:
            remote = msgspec.msgpack.decode(address, type=UnixAddress)
        except msgspec.MsgspecError as exc:
            raise ProtocolError(f"the shared-memory address of {peer} is not of this version: {exc}") from exc
        endpoint = SharedMemoryEndpoint(self._name, peer, counters or self._counters, self._endpoints.discard)
        self._endpoints.add(endpoint)
        await endpoint.open(remote)
        return endpoint

    def register(self, buffer: Buffer) -> None:
        """Let writers map `buffer`, those of today and those to come."""
        shared = self._segments.add(buffer)
        if shared is not None:
            for incoming in self._let_in_by_now():
                _show(incoming, shared)

    def unregister(self, buffer: Buffer) -> None:
        """Show `buffer` to no further writer, and let all let go of it."""
        shared = self._segments.remove(buffer)
        if shared is not None:
            for incoming in self._let_in_by_now():
                incoming.post(SegmentEnd(shared.number))

    def expose(self, memory: memoryview, peer: str) -> RemoteSlot:
        """See `Transport.expose`.

        Raises:
            ProtocolError: `memory` is not part of a registered buffer.
        """
        self._check_open()
        segment, offset = self._segments.locate(memory, peer)
        entry = self._freed.pop() if self._freed else next(self._free, None)
        if entry is None:
            raise ProtocolError(
                f"{self._name}: {NUM_ENTRIES} slots are exposed at once, more than the exposure table holds;"
                " set a larger slot_nbytes"
            )
        word = secrets.randbits(63) + 1
        self._exposed[entry], self._writers[entry] = word, peer
        self._table.set(entry, word)
        return RemoteSlot(SlotToken(segment, offset, entry, word).encode(), memory.nbytes)

    async def withdraw(self, remote: RemoteSlot) -> bool:
        """Take a slot back once nobody writes it: at the latest when its writer has died.

        Who died at it has left it exposed, and so has who never came to it.
        """
        token = decode_slot(remote.token, self._name)
        pause_s = 0.0
        while not self._closed:
            if self._exposed.get(token.entry) != token.word:
                return True
            if self._table.try_lock(token.entry):
                is_left = self._table.holds(token.entry, token.word)
                if not is_left or not any(map(is_ending, self._pids.get(self._writers[token.entry], ()))):
                    self._table.take_back(token.entry)
                    self._table.unlock(token.entry)
                    self._free_entry(token.entry, token.word)
                    return True
                self._table.unlock(token.entry)
            await anyio.sleep(pause_s)  # the writer says nothing when it ends or dies: a capped back-off
            pause_s = min(2 * pause_s + 0.001, _LAST_PAUSE_S)
        return False

    async def aclose(self) -> None:
        """Close all endpoints and the inbox; peers get `PeerLost`. Idempotent."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._socket)
            self._socket.close()
            for incoming in list(self._incoming):
                incoming.close()
            self._table.close()
            os.close(self._memory)
        self._inbox.close()
        for endpoint in list(self._endpoints):
            await endpoint.aclose()

    def _check_open(self) -> None:
        if self._closed:
            raise EndpointClosed(f"{self._name}: the shared-memory transport is closed; open a new one")

    def _listen(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError as exc:
            if exc.errno in _EXHAUSTED:  # the writer waits, and would be reported again at once
                _log.warning("cannot accept a writer", extra={"transport": self._name, "why": str(exc)})
                self._loop.remove_reader(self._socket)
                self._loop.call_later(_ACCEPT_AGAIN_S, self._listen)
            return  # otherwise it has gone again
        incoming = UnixIncoming(
            connection,
            secret=self._own.secret,
            inbox=self._inbox,
            let_in=self._let_in,
            arrived=self._arrived,
            ended=self._incoming.discard,
        )
        self._incoming.add(incoming)

    def _let_in(self, incoming: UnixIncoming) -> None:
        self._pids.setdefault(incoming.peer, set()).add(incoming.pid)  # its predecessor may still be ending
        for shared in self._segments:
            _show(incoming, shared)
        incoming.post(TableFrame(), self._memory)

    def _let_in_by_now(self) -> list[UnixIncoming]:
        """A copy: one that has gone is found out by posting to it, and removed."""
        return [incoming for incoming in self._incoming if incoming.is_in]

    def _arrived(self, notification: Notification) -> None:
        self._free_entry(notification.entry, notification.word)

    def _free_entry(self, entry: int, word: int) -> None:
        if self._exposed.get(entry) == word:
            del self._exposed[entry], self._writers[entry]
            self._freed.append(entry)


def _show(incoming: UnixIncoming, shared: Shared) -> None:
    buffer = shared.buffer
    incoming.post(Segment(shared.number, buffer.nbytes, buffer.is_host), shared.descriptor, of=buffer)
