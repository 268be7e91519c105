"""The two ways to an authenticated control connection over TCP: connect and serve."""

from __future__ import annotations

import functools
import ipaddress
import logging
import ssl
from collections.abc import Awaitable, Callable, Coroutine

import anyio
import anyio.abc
from anyio.streams.tls import TLSStream

from wbridge import errors
from wbridge.control.auth import authenticate_client, authenticate_server
from wbridge.control.connection import BROKEN, Connection
from wbridge.errors import ConfigError, EndpointClosed, PeerLost, WBridgeError

HANDSHAKE_S = 10.0
"""A peer that has not authenticated itself after this time is cut off."""
ACCEPT_AGAIN_S = 0.1
"""After this time a listener that could not accept a peer, for want of a descriptor, tries again."""

_log = logging.getLogger(__name__)


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
        raise ConfigError(
            f"cannot listen on {join_address(host, port)}: {exc}; give each job an address of this machine"
            " and a port that nothing else uses, or a file:/// rendezvous"
        ) from exc
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
    except BROKEN as exc:
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
