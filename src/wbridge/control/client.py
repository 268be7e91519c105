"""A worker's way to the coordinator: find it, authenticate, say who we are, learn the job's settings."""

from __future__ import annotations

import random
import ssl
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from wbridge.config import Config
from wbridge.control.agreement import Explicit
from wbridge.control.connection import Connection
from wbridge.control.messages import Committed, Hello, StatusReply, StatusRequest, Welcome
from wbridge.control.rendezvous import FileRendezvous, Rendezvous, look_up
from wbridge.control.tcp import HANDSHAKE_S, connect_tcp
from wbridge.errors import AuthenticationError, BarrierTimeout, PeerLost, ProtocolError, WBridgeError
from wbridge.ids import WorkerId

FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 2.0

T = TypeVar("T")


async def connect_coordinator(
    rendezvous: Rendezvous,
    worker: WorkerId,
    config: Config,
    *,
    explicit: Explicit,
    host: str,
    adapter_token: str,
    secret: bytes = b"",
    committed: Committed | None = None,
    tls: ssl.SSLContext | None = None,
) -> tuple[Connection, Welcome]:
    """Connect and be admitted, with capped back-off while no coordinator is there.

    `host` and `adapter_token` are this worker's host identity and a text that no other adapter has;
    `committed` is what it still holds from before. Cancelled: nothing stays open.

    Raises:
        BarrierTimeout: no coordinator was there within `config.connect_timeout_s`.
        AuthenticationError: the secrets differ.
        ProtocolError: the coordinator speaks another protocol version.
        ConfigError: the rendezvous cannot be used, or the coordinator refuses this worker: its identity is
            taken, or a job-wide setting differs.
    """
    hello = Hello(worker, host, adapter_token, explicit, committed)

    async def admit(connection: Connection) -> tuple[Connection, Welcome]:
        await connection.send(hello)
        welcome = await connection.receive()
        if not isinstance(welcome, Welcome):
            raise ProtocolError(f"{connection.remote} answered {type(welcome).__name__} to our Hello")
        return connection, welcome

    return await _retry(rendezvous, admit, secret, tls, config.connect_timeout_s)


async def request_status(
    rendezvous: Rendezvous, config: Config, *, secret: bytes = b"", tls: ssl.SSLContext | None = None
) -> StatusReply:
    """Ask the coordinator for members, versions and whom it waits for. Raises as `connect_coordinator`."""

    async def ask(connection: Connection) -> StatusReply:
        async with connection:
            await connection.send(StatusRequest())
            reply = await connection.receive()
            if not isinstance(reply, StatusReply):
                raise ProtocolError(
                    f"{connection.remote} answered {type(reply).__name__} to a status request"
                )
            return reply

    return await _retry(rendezvous, ask, secret, tls, config.connect_timeout_s)


async def _retry(
    rendezvous: Rendezvous,
    talk: Callable[[Connection], Awaitable[T]],
    secret: bytes,
    tls: ssl.SSLContext | None,
    limit_s: float,
) -> T:
    """Connect and `talk` until that works or cannot work, for at most `limit_s` seconds."""
    last: WBridgeError = PeerLost("no attempt was finished")
    backoff_s = FIRST_BACKOFF_S
    with anyio.move_on_after(limit_s):
        while True:
            try:
                return await _try_once(rendezvous, talk, secret, tls)
            except PeerLost as exc:
                last = exc
            except AuthenticationError as exc:
                if secret or not isinstance(rendezvous, FileRendezvous):
                    raise
                last = exc  # the file may be a dead coordinator's, and its port another's by now
            await anyio.sleep(backoff_s * random.uniform(0.5, 1.0))  # capped back-off
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
    if isinstance(last, AuthenticationError):
        raise last
    raise BarrierTimeout(
        f"no coordinator within {limit_s:g} s ({last}); start trainer rank 0 or `wbridge coordinator`,"
        " or raise connect_timeout_s",
        ["coordinator"],
    ) from last


async def _try_once(
    rendezvous: Rendezvous,
    talk: Callable[[Connection], Awaitable[T]],
    secret: bytes,
    tls: ssl.SSLContext | None,
) -> T:
    meeting = look_up(rendezvous, secret)
    try:
        with anyio.fail_after(HANDSHAKE_S):
            connection = await connect_tcp(meeting.address, secret=meeting.secret, tls=tls)
            try:
                return await talk(connection)
            except BaseException:  # whatever it is, nothing stays open; raised again
                await connection.aclose()
                raise
    except TimeoutError as exc:
        if isinstance(exc, WBridgeError):
            raise
        raise PeerLost(f"{meeting.address} accepted the connection and did not answer") from exc
