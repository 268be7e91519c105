"""Coordinator: admits workers, forms epochs, gives tickets. One per job; it carries no weights."""

from __future__ import annotations

import functools
import hashlib
import secrets
import ssl
from collections.abc import Mapping

import anyio
import anyio.abc
import anyio.to_thread
import msgspec

from wbridge.config import Config
from wbridge.control.agreement import job_values
from wbridge.control.connection import LINGER_S, Connection
from wbridge.control.epochs import Epochs
from wbridge.control.lease import LeasedConnection
from wbridge.control.local import Lease, LocalLease, local_pair
from wbridge.control.membership import Joined, Member, Membership
from wbridge.control.messages import (
    Bye,
    EpochReady,
    Hello,
    Join,
    Keyed,
    Message,
    Reconfigure,
    StatusReply,
    StatusRequest,
    Welcome,
)
from wbridge.control.reconfiguring import Reconfiguring
from wbridge.control.tcp import HANDSHAKE_S, serve_tcp
from wbridge.errors import EndpointClosed, InternalError, PeerLost, ProtocolError, WBridgeError
from wbridge.plan.tables import MapTable


class Coordinator:
    """The meeting point of one job. Its config is authoritative for the job-wide settings.

    Start `serve` in a task group; it reports the address and runs until `leave` or cancellation, after
    which every member finds its connection closed.
    """

    def __init__(
        self,
        config: Config,
        *,
        secret: bytes,
        origins: Mapping[str, str] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._settings = Reconfiguring(config, origins or {})
        self._secret = secret
        self._host, self._port = host, port
        self._tls = tls
        self._membership = Membership()
        self.incarnation: int = secrets.randbits(64)
        self._epochs = Epochs(self._settings, self.incarnation, self._membership)
        self._address: str | None = None
        self._scope = anyio.CancelScope()
        self._tasks: anyio.abc.TaskGroup

    @property
    def address(self) -> str:
        """`host:port` once `serve` has started."""
        if self._address is None:
            raise InternalError("the coordinator has no address before `serve` has started")
        return self._address

    async def serve(self, *, task_status: anyio.abc.TaskStatus[str] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until `leave` or cancellation. `task_status` receives the address.

        Raises:
            ConfigError: the address cannot be bound, or is reachable from elsewhere without a secret.
        """
        with self._scope:
            async with anyio.create_task_group() as self._tasks:
                serve = functools.partial(
                    serve_tcp, self._serve_peer, self._host, self._port, secret=self._secret, tls=self._tls
                )
                self._tasks.start_soon(self._epochs.run)
                self._address = await self._tasks.start(serve)
                task_status.started(self._address)

    async def leave(self) -> None:
        """Say goodbye to every member, then stop serving. Waits at most a second; cancelled: not at all."""
        try:
            for member in self._membership:
                member.lease.post(Bye())
                member.lease.finish()
            with anyio.move_on_after(LINGER_S):
                await self._epochs.wait_until(lambda: not any(self._membership))
        finally:
            self._scope.cancel()

    async def admit_local(self, hello: Hello) -> tuple[LocalLease, Welcome]:
        """Admit the worker in whose loop this runs. Cancelled: it has left.

        Raises:
            ConfigError: this coordinator refuses it, as `connect_coordinator` tells others.
        """
        near, far = local_pair(str(hello.worker), f"the coordinator at {self.address}")
        self._tasks.start_soon(self._serve_local, self._admit(hello, far))
        try:
            welcome = await near.receive()
        except BaseException:  # whatever it is, nobody is there; raised again
            near.abort("this side has left")
            raise
        assert isinstance(welcome, Welcome), "whoever is admitted is welcomed first"
        return near, welcome

    async def _serve_local(self, member: Member) -> None:
        try:
            await self._serve_member(member)
        finally:
            member.lease.abort("the coordinator has ended")

    def status(self) -> StatusReply:
        return self._epochs.status()

    async def _serve_peer(self, connection: Connection) -> None:
        """One authenticated peer, from its first message to its loss."""
        first: Message | None = None
        with anyio.move_on_after(HANDSHAKE_S):
            first = await connection.receive()
        if isinstance(first, StatusRequest):
            await connection.send(self.status())
        elif isinstance(first, Hello):
            lease = LeasedConnection(connection, self._settings.config.heartbeat_s)
            await self._serve_member(self._admit(first, lease))
        elif first is not None:
            raise ProtocolError(f"{connection.remote} began with {type(first).__name__} instead of Hello")

    def _admit(self, hello: Hello, lease: Lease) -> Member:
        self._settings.check(hello.worker, hello.explicit)
        member = Member(hello, lease)
        replaced = self._membership.check(member)
        if replaced is not None:
            replaced.lease.abort("the same process has connected again")
            self._epochs.lose(replaced, "it has connected again")
        self._membership.add(member)
        self._epochs.changed()
        return member

    async def _serve_member(self, member: Member) -> None:
        lease = member.lease
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lease.run)
            config = self._settings.config
            lease.post(Welcome(self.incarnation, job_values(config), config.heartbeat_s))
            try:
                while member.joined is None:
                    await self._introduce(member, await lease.receive())
                await lease.deliver(functools.partial(self._act, member))
            except (PeerLost, EndpointClosed) as exc:
                self._epochs.lose(member, str(exc))
                lease.abort(str(exc))
            except WBridgeError as exc:
                self._epochs.reject(member, exc)
                await lease.wait_lost()

    async def _introduce(self, member: Member, message: Message) -> None:
        if isinstance(message, Join) and member in self._membership:
            await self._join(member, message)
        else:
            self._act(member, message)

    def _act(self, member: Member, message: Message) -> None:
        if member not in self._membership:
            return  # rejected or replaced: it has yet to notice
        match message:
            case Keyed():
                self._epochs.receive(member, message)
            case EpochReady():
                self._epochs.ready(member, message)
            case Reconfigure():
                self._epochs.reconfigure(member, message)
            case StatusRequest():
                member.lease.post(self.status())
            case Bye():
                raise PeerLost("it said goodbye")
            case Join():
                raise ProtocolError(f"{member} joined twice on one connection")
            case _:
                raise ProtocolError(f"{member} sent {type(message).__name__}, which no worker sends here")

    async def _join(self, member: Member, message: Join) -> None:
        digest = (await anyio.to_thread.run_sync(hashlib.sha256, message.table)).digest()
        table = self._membership.find_table(digest)
        if table is None:
            try:
                table = await anyio.to_thread.run_sync(_decode_table, message.table)
            except msgspec.MsgspecError as exc:
                raise ProtocolError(f"{member} sent no source map: {exc}") from exc
        member.joined = Joined(
            table=table,
            digest=digest,
            transport_address=message.transport_address,
            lockstep_address=message.lockstep_address,
            since_s=anyio.current_time(),
            patience_s=message.patience_s or self._settings.config.connect_timeout_s,
        )
        self._epochs.changed()


def _decode_table(encoded: bytes) -> MapTable:
    return msgspec.msgpack.decode(encoded, type=MapTable)
