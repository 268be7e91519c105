"""A connection with a lease: posting never waits, an idle side sends heartbeats, silence is loss."""

from __future__ import annotations

from types import TracebackType

import anyio
import anyio.abc

from wbridge.control.connection import Connection
from wbridge.control.messages import Heartbeat, Message
from wbridge.errors import EndpointClosed, PeerLost

MISSED_RENEWALS = 3
"""After this many heartbeats that did not come, a peer counts as lost."""
MAX_POSTED = 4096
"""Frames that may wait for one slow peer; one more and it counts as lost."""


class LeasedConnection:
    """Both ends of a member's connection, between a handshake and the loss of the peer.

    The owner runs `run` in its task group; it takes over `connection` and closes it at the end.
    """

    def __init__(self, connection: Connection, heartbeat_s: float) -> None:
        self._connection = connection
        self._heartbeat_s = heartbeat_s
        self._posts, self._outbox = anyio.create_memory_object_stream[Message](MAX_POSTED)

    @property
    def remote(self) -> str:
        return self._connection.remote

    def post(self, message: Message) -> None:
        """Queue one message; it is sent after those posted before it. Never waits.

        Raises:
            PeerLost: the peer does not read, or is gone.
            EndpointClosed: this side has closed the connection.
        """
        try:
            self._posts.send_nowait(message)
        except anyio.WouldBlock as exc:
            raise PeerLost(f"{self.remote} does not read: {MAX_POSTED} messages wait for it") from exc
        except anyio.BrokenResourceError as exc:
            raise PeerLost(f"{self.remote} is gone") from exc
        except anyio.ClosedResourceError as exc:
            raise EndpointClosed(f"the connection to {self.remote} is closed") from exc

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Send what is posted until `finish`, the peer's loss or cancellation; then close the connection.

        Does not raise the loss: `receive` does, in the task that can act on it.
        """
        task_status.started()
        try:
            with self._outbox:
                await self._send_all()
        except (PeerLost, EndpointClosed):
            pass  # closing the connection makes `receive` raise
        finally:
            await self._connection.aclose()

    async def _send_all(self) -> None:
        while True:
            message: Message = Heartbeat()
            with anyio.move_on_after(self._heartbeat_s):
                try:
                    message = await self._outbox.receive()
                except anyio.EndOfStream:
                    return
            await self._connection.send(message)

    async def receive(self) -> Message:
        """Return the next message that is no heartbeat. Cancelled: nothing is lost.

        Raises:
            PeerLost: the peer is gone, or silent for three heartbeats.
            ProtocolError: what it sent is no message.
            EndpointClosed: this side has closed the connection.
            WBridgeError: the class and text with which the peer rejected this side.
        """
        lease_s = MISSED_RENEWALS * self._heartbeat_s
        while True:
            message: Message | None = None
            with anyio.move_on_after(lease_s):
                message = await self._connection.receive()
            if message is None:
                raise PeerLost(f"{self.remote} was silent for {lease_s:g} s, {MISSED_RENEWALS} heartbeats")
            if not isinstance(message, Heartbeat):
                return message

    def finish(self) -> None:
        """Send what was posted, then close. Idempotent; nothing can be posted afterwards."""
        self._posts.close()

    async def aclose(self) -> None:
        """Close at once; what was posted and not sent is dropped. Idempotent."""
        self._posts.close()
        await self._connection.aclose()

    async def __aenter__(self) -> LeasedConnection:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
