"""One authenticated control connection over TCP, and the two ways to get one: connect and serve."""

from __future__ import annotations

import functools
import ipaddress
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType

import anyio
import anyio.abc
from anyio.streams.tls import TLSStream

from wbridge import errors
from wbridge.control import codec
from wbridge.control.auth import authenticate_client, authenticate_server
from wbridge.control.messages import Message, Reconfigured, Rejected, Verified
from wbridge.errors import ConfigError, EndpointClosed, PeerLost, ProtocolError, WBridgeError

HANDSHAKE_S = 10.0
"""A peer that has not authenticated itself after this time is cut off."""
LINGER_S = 1.0
"""How long a rejected peer may take to read why."""
ACCEPT_AGAIN_S = 0.1
"""After this time a listener that could not accept a peer, for want of a descriptor, tries again."""

_log = logging.getLogger(__name__)

_BROKEN = (anyio.BrokenResourceError, anyio.EndOfStream, ssl.SSLError, OSError)


class Connection:
    """Messages to and from one peer, in order. Any task may send; one task receives.

    Whoever opened it closes it: use it as an async context manager, or call `aclose`.
    """

    def __init__(self, stream: anyio.abc.ByteStream, remote: str) -> None:
        self._stream = stream
        self._come = bytearray()
        self._socket: socket.socket | None = None
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
                raise EndpointClosed(f"the connection to {self._remote} is closed") from exc
            except _BROKEN as exc:
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
        try:
            while (body := self._cut()) is None:
                self._come += await self._stream.receive()
                self.num_reads += 1
            message = codec.decode(body)
        except anyio.ClosedResourceError as exc:
            raise EndpointClosed(f"the connection to {self._remote} is closed") from exc
        except ProtocolError as exc:
            self._come.clear()  # where the next message begins is not known
            raise ProtocolError(f"{self._remote}: {exc}") from exc
        except _BROKEN as exc:
            raise self._lost(exc) from exc
        if isinstance(message, Rejected):
            raise rebuild_error(message)
        return message

    def _cut(self) -> bytes | None:
        """Take the body of the next message out of what has come; None if that is not whole."""
        if len(self._come) < codec.HEADER_NBYTES:
            return None
        nbytes = codec.decode_header(bytes(self._come[: codec.HEADER_NBYTES]), self._limit_nbytes)
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
        except (*_BROKEN, WBridgeError, anyio.ClosedResourceError):
            pass  # it has gone, which is what was asked of it
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Close at once. Idempotent; does not wait for the peer."""
        if not self._closed:
            self._closed = True
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
            raise EndpointClosed(f"the connection to {self._remote} is closed")
        if self._broken:
            raise PeerLost(f"the connection to {self._remote} broke while a message was being sent")

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


def split_address(address: str) -> tuple[str, int]:
    """Split `host:port` (an IPv6 host in brackets).

    Raises:
        ConfigError: it is not of that form.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{address!r} is not host:port; write for example 127.0.0.1:7717")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`; a name other than `localhost` counts as reachable."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def connect_tcp(address: str, *, secret: bytes, tls: ssl.SSLContext | None = None) -> Connection:
    """Connect to `host:port` and authenticate in both directions. Cancelled: nothing stays open.

    Raises:
        PeerLost: nobody listens there, or the listener went away.
        AuthenticationError: the listener has another secret.
        ProtocolError: the listener speaks another protocol version, or something else altogether.
    """
    host, port = split_address(address)
    _check_secret(host, secret, "connect to")
    try:
        stream: anyio.abc.ByteStream = await anyio.connect_tcp(host, port)
    except OSError as exc:
        raise PeerLost(f"cannot connect to {address}: {exc}") from exc
    connection: Connection | None = None
    try:
        if tls is not None:
            stream = await _start_tls(stream, address, tls, server_hostname=host)
        connection = Connection(stream, address)
        await authenticate_client(connection, secret)
        connection.trust()
    except BaseException:  # whatever it is, nothing stays open; raised again
        await anyio.aclose_forcefully(stream)
        raise
    return connection


async def serve_tcp(
    handler: Callable[[Connection], Awaitable[None]],
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    secret: bytes,
    tls: ssl.SSLContext | None = None,
    task_status: anyio.abc.TaskStatus[str] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Listen until cancelled; start `handler` in a task for each peer that has authenticated itself.

    `task_status` receives the address as `host:port`; port 0 lets the system choose. The handler owns the
    connection while it runs; afterwards it is closed. A `WBridgeError` it raises is sent to the peer.

    Raises:
        ConfigError: `host` is reachable from other machines and there is no secret, or cannot be bound.
    """
    _check_secret(host, secret, "listen on")
    try:
        listener = await anyio.create_tcp_listener(local_host=host, local_port=port)
    except OSError as exc:
        raise ConfigError(f"cannot listen on {join_address(host, port)}: {exc}") from exc
    try:
        address = join_address(host, listener.extra(anyio.abc.SocketAttribute.local_port))
        serve_one = functools.partial(_serve_one, handler=handler, secret=secret, tls=tls)
        async with anyio.create_task_group() as tasks:
            for each in listener.listeners:
                tasks.start_soon(_accept_all, each, serve_one, tasks)
            task_status.started(address)
    finally:
        with anyio.CancelScope(shield=True):
            await listener.aclose()


async def _accept_all(
    listener: anyio.abc.Listener[anyio.abc.SocketStream],
    serve_one: Callable[[anyio.abc.SocketStream], Coroutine[object, object, None]],
    tasks: anyio.abc.TaskGroup,
) -> None:
    """Start `serve_one` in `tasks` for each peer, until cancelled.

    Waiting and accepting are apart, since an accept that is cancelled loses a peer that comes just then.
    """
    assert isinstance(listener, anyio.abc.SocketListener), "what listens for TCP accepts sockets"
    pending = listener.extra(anyio.abc.SocketAttribute.raw_socket)
    while True:
        try:
            await anyio.wait_readable(pending)
            with anyio.move_on_after(ACCEPT_AGAIN_S, shield=True):  # it is there, unless it has gone again
                tasks.start_soon(serve_one, await listener.accept())
        except OSError as exc:
            _log.warning("cannot accept a peer", extra={"why": str(exc)})
            await anyio.sleep(ACCEPT_AGAIN_S)  # the back-off, at its cap


async def _serve_one(
    stream: anyio.abc.SocketStream,
    handler: Callable[[Connection], Awaitable[None]],
    secret: bytes,
    tls: ssl.SSLContext | None,
) -> None:
    remote = _remote_name(stream)
    connection = Connection(stream, remote)
    try:
        with anyio.move_on_after(HANDSHAKE_S) as handshake:
            if tls is not None:
                connection = Connection(await _start_tls(stream, remote, tls, server_side=True), remote)
            await authenticate_server(connection, secret)
            connection.trust()
        if not handshake.cancelled_caught:
            await handler(connection)
    except (PeerLost, EndpointClosed):
        pass  # the handler has noted the loss; a stranger who left concerns nobody
    except WBridgeError as exc:
        await connection.reject(exc)
    finally:
        with anyio.CancelScope(shield=True):
            await connection.aclose()
            await anyio.aclose_forcefully(stream)


async def _start_tls(
    stream: anyio.abc.ByteStream,
    remote: str,
    context: ssl.SSLContext,
    *,
    server_side: bool = False,
    server_hostname: str | None = None,
) -> TLSStream:
    try:
        return await TLSStream.wrap(
            stream,
            server_side=server_side,
            hostname=server_hostname,
            ssl_context=context,
            standard_compatible=False,
        )
    except ssl.SSLError as exc:
        raise errors.AuthenticationError(f"TLS with {remote} failed: {exc}; check both certificates") from exc
    except _BROKEN as exc:
        raise PeerLost(f"{remote} is gone: {exc}") from exc


def _remote_name(stream: anyio.abc.SocketStream) -> str:
    try:
        address = stream.extra(anyio.abc.SocketAttribute.remote_address)
    except (anyio.TypedAttributeLookupError, OSError):
        return "a peer that has left"
    return join_address(str(address[0]), int(address[1])) if isinstance(address, tuple) else str(address)


def _check_secret(host: str, secret: bytes, verb: str) -> None:
    if not secret and not is_loopback(host):
        raise ConfigError(
            f"refusing to {verb} {host}, which is not loopback, without a secret;"
            " set the same WBRIDGE_SECRET for every worker"
        )
