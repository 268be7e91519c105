"""A connection with a lease: posting never waits, an idle side sends heartbeats, silence is loss."""

from __future__ import annotations

import collections
from types import TracebackType

import anyio
import anyio.abc

from wbridge.control.connection import LINGER_S, Connection
from wbridge.control.messages import Heartbeat, Message
from wbridge.errors import EndpointClosed, PeerLost, ProtocolError, WBridgeError

MISSED_RENEWALS = 3
"""After this many heartbeats that did not come, a peer counts as lost."""
LAST_LOOK_S = 0.01
"""After the last of them: long enough to find what came while this process did not run."""
MAX_POSTED = 4096
"""Frames that may wait for one slow peer; one more and it counts as lost."""


class LeasedConnection:
    """Either end of a connection that lasts: from the handshake to the loss of the peer.

    It takes over `connection`; `run`, which the owner starts in its task group, closes it. The owner calls
    `receive` from one task until that raises; any task of the loop may post. Leaving the context aborts and
    closes.
    """

    def __init__(self, connection: Connection, heartbeat_s: float) -> None:
        self._connection = connection
        self._heartbeat_s = heartbeat_s
        self._outbox: collections.deque[Message] = collections.deque()
        self._posted = anyio.Event()
        self._finished = False
        self._scope = anyio.CancelScope()
        self._aborted = ""
        self._over = anyio.Event()

    @property
    def remote(self) -> str:
        return self._connection.remote

    def post(self, message: Message) -> None:
        """Queue one message; it is sent after those posted before it. Never waits, never raises.

        A peer that is gone, or does not read and so lets too many pile up, is reported by `receive`.
        """
        if self._finished:
            return  # `receive` tells the owner
        if len(self._outbox) >= MAX_POSTED:
            self.abort(f"it does not read: {MAX_POSTED} messages wait for it")
            return
        self._outbox.append(message)
        self._posted.set()

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Send what is posted until `finish`, `abort`, the peer's loss or cancellation; then close.

        Does not raise the loss: `receive` does, in the task that can act on it.
        """
        task_status.started()
        try:
            with self._scope:
                await self._send_all()
                with anyio.move_on_after(LINGER_S):  # closing with unread input would cut off what we sent
                    await self._over.wait()
        except (PeerLost, EndpointClosed):
            pass
        finally:
            self._finished = True
            await self._connection.aclose()

    async def _send_all(self) -> None:
        while self._outbox or not self._finished:
            if self._outbox:
                await self._connection.send(self._outbox.popleft())
                continue
            with anyio.move_on_after(self._heartbeat_s) as idle:
                self._posted = anyio.Event()
                await self._posted.wait()
            if idle.cancelled_caught:
                await self._connection.send(Heartbeat())

    async def receive(self) -> Message:
        """Return the next message that is no heartbeat. Cancelled: nothing is lost.

        Raises:
            PeerLost: the peer is gone, silent for three heartbeats, or was given up by `abort`.
            ProtocolError: what it sent is no message.
            EndpointClosed: this side has closed the connection.
            WBridgeError: the class and text with which the peer rejected this side.
        """
        try:
            while True:
                message = await self._receive_in_time()
                if not isinstance(message, Heartbeat):
                    return message
        except ProtocolError:
            raise  # the peer is still there and can be told
        except WBridgeError as exc:
            self._over.set()
            if self._aborted:
                raise PeerLost(f"{self.remote} is given up: {self._aborted}") from exc
            raise

    async def _receive_in_time(self) -> Message:
        """Return the next message of a peer that keeps sending, if only parts of one.

        A timer that is late may fire before what came meanwhile is read. So each heartbeat is waited for
        by itself: a pause of this process or its machine, however long, is one that did not come.
        """
        waits_s = (self._heartbeat_s,) * MISSED_RENEWALS + (LAST_LOOK_S,)
        num_missed = 0
        while num_missed < len(waits_s):
            num_buffered = self._connection.num_buffered
            with anyio.move_on_after(waits_s[num_missed]):
                return await self._connection.receive()
            num_missed = num_missed + 1 if self._connection.num_buffered == num_buffered else 0
        lease_s = MISSED_RENEWALS * self._heartbeat_s
        raise PeerLost(f"{self.remote} was silent for {lease_s:g} s, {MISSED_RENEWALS} heartbeats")

    async def wait_lost(self) -> None:
        """Ignore what still arrives, until the peer is gone."""
        try:
            while True:
                await self.receive()
        except WBridgeError:
            self._over.set()

    def finish(self) -> None:
        """Send what was posted, let the peer leave for a second, then close. Nothing is sent afterwards."""
        self._finished = True
        self._posted.set()

    def abort(self, reason: str) -> None:
        """Close at once and drop what was not sent; `receive` raises `PeerLost` with this reason."""
        self._aborted = self._aborted or reason
        self._finished = True
        self._scope.cancel()

    async def __aenter__(self) -> LeasedConnection:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort("this side has left")
        await self._connection.aclose()  # `run` may never have begun
