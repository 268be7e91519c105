"""SharedMemoryEndpoint: writes into the memory of another process of this host, and notifies it."""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
from collections.abc import Callable, Sequence
from typing import Final

import anyio
import anyio.to_thread

from wbridge.device.base import PeerMemory
from wbridge.device.memory import ExportedMemory, populate
from wbridge.errors import ConfigError, EndpointClosed, PeerLost, ProtocolError, WBridgeError
from wbridge.transport.base import RemoteSlot, Window, WriteInPlace
from wbridge.transport.copying import Copies, copy
from wbridge.transport.counters import Counters
from wbridge.transport.exposure_table import ExposureTable
from wbridge.transport.limits import check_message, check_put
from wbridge.transport.operations import Operations
from wbridge.transport.unix_frames import (
    MAX_FRAME_NBYTES,
    Frame,
    Hello,
    Notification,
    Payload,
    Segment,
    SegmentEnd,
    SlotToken,
    TableFrame,
    UnixAddress,
    decode,
    decode_slot,
    encode,
    encode_hello,
)

_LOCK_RETRY_S: Final = 0.0005


class SharedMemoryEndpoint:
    """One connection to a receiver. Its reads are callbacks of the loop, so it has no task of its own."""

    put_runs: Final = None
    put_from_gpu: Final = None

    def __init__(
        self, owner: str, peer: str, counters: Counters, forget: Callable[[SharedMemoryEndpoint], None]
    ) -> None:
        self._owner = owner
        self._peer = peer
        self._counters = counters
        self._forget = forget
        self._loop = asyncio.get_running_loop()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._order = anyio.Lock(fast_acquire=True)
        self._operations = Operations()
        self._copies = Copies()
        self._table: ExposureTable | None = None
        # 0: where an empty slot lies. None: nothing is exposed there any more.
        self._segments: dict[int, PeerMemory | None] = {0: memoryview(bytearray())}
        self._populated = {0}
        self._news = anyio.Event()

    @property
    def peer(self) -> str:
        return self._peer

    async def open(self, address: UnixAddress) -> None:
        """Connect, and return when the receiver has let us in.

        Raises:
            PeerLost: nobody listens there, or it refuses us.
            ConfigError: this process cannot map its memory.
        """
        try:
            with self._operations.run():
                try:
                    await self._loop.sock_connect(self._socket, address.name)
                except OSError as exc:
                    raise self._lost_error() from exc
                self._loop.add_reader(self._socket, self._read)
                await self._transmit(encode_hello(Hello(address.secret, self._owner)))
                while self._table is None:
                    await self._news.wait()
        except BaseException:  # whatever it is, the connection does not stay; raised again
            self._end(self._closed_error)
            self._free()
            raise

    async def put(self, source: memoryview, remote: RemoteSlot, notify: bytes) -> None:
        """See `Endpoint.put`. Cancelled while bytes are copied: waits for the end of the copy."""
        check_put(source, remote, notify, self._peer)

        async def write(window: Window) -> bytes:
            await copy(window.view, source)
            return notify

        await self.fill(remote, write)

    async def fill(self, remote: RemoteSlot, write: WriteInPlace) -> None:
        """See `Endpoint.fill`. A slot that was withdrawn, or filled before, is left alone."""
        token = decode_slot(remote.token, self._peer)
        with self._operations.run():
            async with self._copies.one():
                segment = await self._segment(token.segment)
                if segment is None or not await self._begin(token):
                    return
                try:
                    notify = await write(Window(segment, token.offset, remote.nbytes))
                finally:
                    self._finish(token)
            await self._transmit_in_order(Notification(token.entry, token.word, notify))
            self._counters.add_put(remote.nbytes)

    async def send(self, payload: bytes) -> None:
        """See `Endpoint.send`. Cancelled: the message is not sent."""
        if self.send_now(payload):
            return
        with self._operations.run():
            await self._transmit_in_order(Payload(payload))
            self._counters.add_message()

    def send_now(self, payload: bytes) -> bool:
        check_message(payload, self._peer)
        if self._operations.ended or self._order.locked() or not self._try_transmit(Payload(payload)):
            return False
        self._counters.add_message()
        return True

    async def flush(self) -> None:
        await self._copies.settle()

    async def aclose(self) -> None:
        """End what waits for the peer, then wait for running copies. Idempotent."""
        self._end(self._closed_error)
        with anyio.CancelScope(shield=True):
            await self.flush()
        self._free()

    def _free(self) -> None:
        if self._table is not None:
            self._table.close()
        self._segments.clear()
        self._forget(self)

    # Slots -------------------------------------------------------------------------------------------------

    async def _segment(self, number: int) -> PeerMemory | None:
        """A credit may overtake the frame that tells of its segment."""
        while number not in self._segments:
            await self._news.wait()
        segment = self._segments[number]
        if number not in self._populated and isinstance(segment, memoryview):
            self._populated.add(number)
            await anyio.to_thread.run_sync(populate, segment)  # its pages exist, but are not mapped here
        return segment

    async def _begin(self, token: SlotToken) -> bool:
        """Take the slot, unless it is not exposed any more."""
        table = self._table
        assert table is not None
        while True:
            if table.try_lock(token.entry):
                break
            await anyio.sleep(_LOCK_RETRY_S)  # the receiver has it for a moment
        if table.holds(token.entry, token.word):
            return True
        table.unlock(token.entry)
        return False

    def _finish(self, token: SlotToken) -> None:
        assert self._table is not None
        self._table.take_back(token.entry)
        self._table.unlock(token.entry)

    # The connection ----------------------------------------------------------------------------------------

    def _try_transmit(self, frame: Frame) -> bool:
        try:
            self._socket.send(encode(frame), socket.MSG_NOSIGNAL)
        except OSError:  # no room, or no peer: `_transmit` waits for the one and tells of the other
            return False
        return True

    async def _transmit_in_order(self, frame: Frame) -> None:
        async with self._order:
            await self._transmit(encode(frame))

    async def _transmit(self, packet: bytes) -> None:
        """Cancelled: not sent."""
        while True:
            try:
                self._socket.send(packet, socket.MSG_NOSIGNAL)
                return
            except BlockingIOError:
                await anyio.wait_writable(self._socket)
            except OSError as exc:
                self._end(self._lost_error)
                raise self._lost_error() from exc

    def _read(self) -> None:
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._socket, MAX_FRAME_NBYTES, 1)
        except BlockingIOError:
            return
        except OSError:
            packet, descriptors = b"", []
        try:
            if not packet:
                self._end(self._lost_error)
                return
            self._take(decode(packet, self._peer), descriptors)
        except (
            ProtocolError,
            OSError,
            ValueError,
        ) as exc:  # nobody awaits this callback
            why = f"{self._owner}: cannot use the shared memory of {self._peer}: {exc}"
            self._end(lambda: ConfigError(f"{why}; raise the limit of open files, or set transport='ucxx'"))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        news, self._news = self._news, anyio.Event()
        news.set()

    def _take(self, frame: Frame, descriptors: Sequence[int]) -> None:
        match frame, descriptors:
            case TableFrame(), [table] if self._table is None:
                self._table = ExposureTable(table)
            case Segment(number, nbytes, True), [memory]:
                self._segments[number] = _map(memory, nbytes)
            case Segment(number, nbytes), [memory]:
                self._segments[number] = ExportedMemory(os.dup(memory), nbytes)
            case SegmentEnd(number), []:
                self._segments[number] = None
            case _:
                raise ProtocolError(
                    f"a frame came with {len(descriptors)} descriptors, or one that only a writer sends"
                )

    def _end(self, build_error: Callable[[], WBridgeError]) -> None:
        """Running and later calls raise that error; the first one stays. Nothing is read any more."""
        self._operations.end(build_error)
        if self._socket.fileno() != -1:
            self._loop.remove_reader(self._socket)
            anyio.notify_closing(self._socket)
            self._socket.close()

    def _closed_error(self) -> EndpointClosed:
        return EndpointClosed(f"{self._owner}: the endpoint to {self._peer} is closed; connect again")

    def _lost_error(self) -> PeerLost:
        return PeerLost(
            f"{self._owner}: {self._peer} has ended or closed its transport; reconnect, or go on without it"
        )


def _map(descriptor: int, nbytes: int) -> memoryview:
    """Map memory of the receiver."""
    return memoryview(mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED))
