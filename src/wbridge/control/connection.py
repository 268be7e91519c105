"""Connection: control messages to and from one peer."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from types import TracebackType

import anyio
import anyio.abc

from wbridge import errors
from wbridge.control import codec
from wbridge.control.messages import Message, Reconfigured, Rejected, Verified
from wbridge.errors import EndpointClosed, PeerLost, ProtocolError, WBridgeError

LINGER_S = 1.0
"""How long a rejected peer may take to read why."""
READ_NBYTES = 64 * 2**10
"""What is read at once: as much as the allocator keeps at hand."""

BROKEN = (anyio.BrokenResourceError, anyio.EndOfStream, ssl.SSLError, OSError)
"""What a stream raises when the peer is gone."""


class Connection:
    """Messages to and from one peer, in order. Any task may send; one task receives.

    Whoever opened it closes it: use it as an async context manager, or call `aclose`.
    """

    def __init__(self, stream: anyio.abc.ByteStream, remote: str) -> None:
        self._stream = stream
        self._come = bytearray()
        self._socket: socket.socket | None = None
        self._take: Callable[[Message], None] | None = None  # while `deliver` runs
        self._ended = anyio.Event()
        self._end: BaseException  # of `deliver`
        self.num_reads = 0
        """How often something has come, if only a part of a message."""
        self._remote = remote
        self._limit_nbytes = codec.MAX_UNAUTHENTICATED_NBYTES
        self._send_lock = anyio.Lock()
        self._broken = False
        self._closed = False

    @property
    def remote(self) -> str:
        """The peer's name for error messages: `host:port`."""
        return self._remote

    @property
    def local_host(self) -> str:
        """This machine's address on this connection: where the peer's network reaches it."""
        address = self._stream.extra(anyio.abc.SocketAttribute.local_address)
        return str(address[0]) if isinstance(address, tuple) else "127.0.0.1"

    def trust(self) -> None:
        """Accept frames of full size from now on: the peer has authenticated itself."""
        self._limit_nbytes = codec.MAX_FRAME_NBYTES
        self._socket = _second_handle(self._stream)

    async def send(self, message: Message) -> None:
        """Send one message; return when the socket has taken it.

        Cancelled: if writing had begun, the frame may be cut, so later sends raise `PeerLost`.

        Raises:
            PeerLost: the peer is gone.
            EndpointClosed: this side has closed the connection.
        """
        await self.send_frame(codec.encode(message))

    async def send_frame(self, frame: bytes) -> None:
        """`send` of what is encoded already, or of its rest."""
        async with self._send_lock:
            self._check_open()
            self._broken = True
            try:
                await self._stream.send(frame)
            except anyio.ClosedResourceError as exc:
                raise self._closed_error() from exc
            except BROKEN as exc:
                raise self._lost(exc) from exc
            self._broken = False

    def send_now(self, frame: bytes) -> bytes:
        """Send what the socket takes without waiting; return the rest, which `send_frame` has to send next.

        Never raises: a peer that is gone takes nothing, and neither does one that is being sent to.
        """
        if self._socket is None or self._broken:
            return frame
        try:
            return frame[self._socket.send(frame) :]
        except OSError:  # no room, or no peer: `send_frame` waits for the one and tells of the other
            return frame

    async def receive(self) -> Message:
        """Return the next message. Cancelled: nothing is lost, the next call returns it.

        Raises:
            PeerLost: the peer is gone.
            ProtocolError: what it sent is no message.
            EndpointClosed: this side has closed the connection.
            WBridgeError: the class and text with which the peer rejected this side.
        """
        while (message := self._next()) is None:
            try:
                self._come += await self._stream.receive()
            except anyio.ClosedResourceError as exc:
                raise self._closed_error() from exc
            except BROKEN as exc:
                raise self._lost(exc) from exc
            self.num_reads += 1
        return message

    async def deliver(self, take: Callable[[Message], None]) -> None:
        """Call `take` with each message as it comes, in the loop and outside any task. Never returns.

        Cancelled: nothing is lost. Raises as `receive`, and what `take` raises.
        """
        if self._socket is None:
            while True:
                take(await self.receive())
        self._check_open()
        self._take, self._ended = take, anyio.Event()
        asyncio.get_running_loop().add_reader(self._socket, self._read, self._socket)
        self._take_all()
        try:
            await self._ended.wait()
        finally:
            self._stop(self._closed_error())
        raise self._end

    def _read(self, readable: socket.socket) -> None:
        try:
            come = readable.recv(READ_NBYTES)
        except BlockingIOError:
            return
        except OSError as exc:
            self._stop(self._lost(exc))
            return
        self.num_reads += 1
        self._come += come
        self._take_all()
        if not come:
            self._stop(self._lost(anyio.EndOfStream()))

    def _take_all(self) -> None:
        try:
            while self._take is not None and (message := self._next()) is not None:
                self._take(message)
        except BaseException as exc:  # whatever it is, `deliver` raises it
            self._stop(exc)

    def _stop(self, error: BaseException) -> None:
        """End `deliver`, if it runs."""
        if self._take is not None:
            assert self._socket is not None, "`deliver` reads only what has a handle of its own"
            self._take, self._end = None, error
            asyncio.get_running_loop().remove_reader(self._socket)
            self._ended.set()

    def _next(self) -> Message | None:
        """Take the next message out of what has come; None if that is not whole."""
        try:
            body = self._cut()
            message = None if body is None else codec.decode(body)
        except ProtocolError as exc:
            self._come.clear()  # where the next message begins is not known
            raise ProtocolError(f"{self._remote}: {exc}") from exc
        if isinstance(message, Rejected):
            raise rebuild_error(message)
        return message

    def _cut(self) -> bytes | None:
        if len(self._come) < codec.HEADER_NBYTES:
            return None
        nbytes = codec.decode_header(self._come[: codec.HEADER_NBYTES], self._limit_nbytes)
        stop = codec.HEADER_NBYTES + nbytes
        if len(self._come) < stop:
            return None
        with memoryview(self._come) as come:
            body = bytes(come[codec.HEADER_NBYTES : stop])
        del self._come[:stop]
        return body

    async def reject(self, error: WBridgeError) -> None:
        """Tell the peer why it cannot stay, and give it a moment to read that. Then close.

        Waits at most a second. Cancelled: the connection is closed at once.
        """
        missing = error.missing if isinstance(error, errors.BarrierTimeout) else ()
        try:
            with anyio.move_on_after(LINGER_S):
                await self.send(Rejected(type(error).__name__, str(error), missing))
                while True:  # closing with unread input would reset the connection before it is read
                    await self._stream.receive()
        except (*BROKEN, WBridgeError, anyio.ClosedResourceError):
            pass  # it has gone, which is what was asked of it
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Close at once. Idempotent; does not wait for the peer."""
        if not self._closed:
            self._closed = True
            self._stop(self._closed_error())
            if self._socket is not None:
                self._socket.close()
            await anyio.aclose_forcefully(self._stream)

    async def __aenter__(self) -> Connection:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _check_open(self) -> None:
        if self._closed:
            raise self._closed_error()
        if self._broken:
            raise PeerLost(f"the connection to {self._remote} broke while a message was being sent")

    def _closed_error(self) -> EndpointClosed:
        return EndpointClosed(f"the connection to {self._remote} is closed")

    def _lost(self, cause: BaseException) -> PeerLost:
        reason = str(cause) or "it closed the connection"
        return PeerLost(f"{self._remote} is gone: {reason}")


def _second_handle(stream: anyio.abc.ByteStream) -> socket.socket | None:
    """Return a handle of our own of the stream's socket: the stream may close its own at any time.

    None if what is written has to pass through the stream (TLS), or if there are no descriptors.
    """
    if not isinstance(stream, anyio.abc.SocketStream):
        return None
    try:
        handle = socket.socket(fileno=socket.dup(stream.extra(anyio.abc.SocketAttribute.raw_socket).fileno()))
    except OSError:
        return None
    handle.setblocking(False)
    return handle


def rebuild_error(message: Rejected | Reconfigured | Verified) -> WBridgeError:
    """Return the error that the peer names; an unknown class is the root."""
    kind = getattr(errors, message.error, WBridgeError)
    if not (isinstance(kind, type) and issubclass(kind, WBridgeError)):
        kind = WBridgeError
    if issubclass(kind, errors.BarrierTimeout):
        return kind(message.message, message.missing)
    return kind(message.message)
