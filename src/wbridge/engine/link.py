"""EngineLink: the connections inside one engine, between its leader and its other workers."""

from __future__ import annotations

import functools
from collections.abc import Callable

import anyio
import anyio.abc

from wbridge.control.connection import Connection
from wbridge.control.lease import LeasedConnection
from wbridge.control.messages import Follow, Introduce, Keyed, Message
from wbridge.control.tcp import HANDSHAKE_S, connect_tcp, serve_tcp
from wbridge.errors import EndpointClosed, PeerLost, ProtocolError, WBridgeError
from wbridge.ids import Epoch, WorkerId

Frame = Keyed | Follow
"""What travels inside an engine."""

Deliver = Callable[[int, Frame], None]
"""Called with (rank, frame) for each frame of another worker of the engine."""

Lost = Callable[[int, str], None]
"""Called with (rank, reason) when a worker of the engine is gone."""


class EngineLink:
    """A star around the leader (rank 0). It lasts as long as the engine, over all epochs.

    A loss is noticed at once, as the end of a connection, without the coordinator.
    """

    def __init__(
        self, worker: WorkerId, *, secret: bytes, heartbeat_s: float, deliver: Deliver, lost: Lost
    ) -> None:
        self._worker = worker
        self._secret = secret
        self._heartbeat_s = heartbeat_s
        self._deliver = deliver
        self._lost = lost
        self._peers: dict[int, LeasedConnection] = {}
        self._all_here = anyio.Event()
        if worker.group_size == 1:
            self._all_here.set()

    async def listen(self, tasks: anyio.abc.TaskGroup, host: str) -> str:
        """Leader: accept the other workers in `tasks`; return the address they connect to."""

        async def serve(*, task_status: anyio.abc.TaskStatus[str]) -> None:
            await serve_tcp(self._accept, host, secret=self._secret, task_status=task_status)

        address: str = await tasks.start(serve)
        return address

    async def join(self, tasks: anyio.abc.TaskGroup, address: str, epoch: Epoch) -> None:
        """Follower: connect to the leader, in `tasks`. Does nothing if connected already.

        Cancelled: connects all the same, since breaking off would be the loss of a worker to the leader.

        Raises:
            PeerLost: the leader does not answer.
        """
        if 0 in self._peers:
            return
        with anyio.move_on_after(HANDSHAKE_S, shield=True):
            connection = await connect_tcp(address, secret=self._secret)
            try:
                await connection.send(Introduce(self._worker, epoch))
            except BaseException:  # whatever it is, nothing stays open; raised again
                await connection.aclose()
                raise
            tasks.start_soon(self._attend, 0, self._adopt(0, connection))
            return
        raise PeerLost(f"{self._worker}: the leader of this engine does not answer at {address}")

    async def wait_complete(self) -> None:
        """Leader: return when every worker of the engine has connected, or one was lost."""
        await self._all_here.wait()

    def post(self, rank: int, frame: Frame) -> None:
        """Send to one worker. Never waits; a frame to a lost worker is dropped, since `lost` tells."""
        lease = self._peers.get(rank)
        if lease is not None:
            try:
                lease.post(frame)
            except (PeerLost, EndpointClosed):
                return  # its reader reports the loss

    def close(self) -> None:
        """Send what was posted, then close."""
        for lease in self._peers.values():
            lease.finish()

    async def _accept(self, connection: Connection) -> None:
        introduction = await connection.receive()
        if not isinstance(introduction, Introduce):
            raise ProtocolError(f"{connection.remote} began with {type(introduction).__name__}, not its name")
        worker = introduction.worker
        if (worker.group, worker.mesh_shape) != (self._worker.group, self._worker.mesh_shape):
            raise ProtocolError(f"{worker} connected to {self._worker}, which leads another engine")
        if worker.rank in self._peers:
            raise ProtocolError(f"{worker} is connected already; give every worker its own mesh coordinate")
        await self._attend(worker.rank, self._adopt(worker.rank, connection))

    def _adopt(self, rank: int, connection: Connection) -> LeasedConnection:
        lease = self._peers[rank] = LeasedConnection(connection, self._heartbeat_s)
        if len(self._peers) == self._worker.group_size - 1:
            self._all_here.set()
        return lease

    def _take(self, rank: int, message: Message) -> None:
        if isinstance(message, Keyed | Follow):
            self._deliver(rank, message)

    async def _attend(self, rank: int, lease: LeasedConnection) -> None:
        async with lease, anyio.create_task_group() as tasks:
            tasks.start_soon(lease.run)
            try:
                await lease.deliver(functools.partial(self._take, rank))
            except WBridgeError as exc:
                self._all_here.set()
                self._lost(rank, str(exc))
            tasks.cancel_scope.cancel()
