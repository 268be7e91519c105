"""A connection with a lease: posting never waits, an idle side sends heartbeats, silence is loss."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

import anyio
import anyio.abc

from wbridge.control import codec
from wbridge.control.connection import LINGER_S, Connection
from wbridge.control.messages import Heartbeat, Message
from wbridge.errors import EndpointClosed, PeerLost, ProtocolError, WBridgeError

MISSED_RENEWALS = 3
"""After this many heartbeats that did not come, a peer counts as lost."""
LAST_LOOK_S = 0.01
"""After the last of them: long enough to find what came while this process did not run."""
MAX_NOW_NBYTES = 64 * 2**10
"""A frame up to this size is written where it is posted, if the socket has room."""
MAX_POSTED = 4096
"""Frames that may wait for one slow peer; one more and it counts as lost."""
ANSWERING = 1.25
"""For how many heartbeats a side that answers the peer's sends none of its own: one wake-up does for both."""


class LeasedConnection:
    """Either end of a connection that lasts: from the handshake to the loss of the peer.

    It takes over `connection`; `run`, which the owner starts in its task group, closes it. The owner calls
    `receive` from one task until that raises; any task of the loop may post. Leaving the context aborts and
    closes.
    """

    def __init__(self, connection: Connection, heartbeat_s: float) -> None:
        self._connection = connection
        self._heartbeat_s = heartbeat_s
        self._outbox: collections.deque[bytes] = collections.deque()  # while it holds any, `run` sends
        self._posted = anyio.Event()
        self._finished = False
        self._scope = anyio.CancelScope()
        self._aborted = ""
        self._over = anyio.Event()
        self._posted_s = 0.0
        self._is_answering = False  # the last post answered a heartbeat, the next one of which is due first
        self._answered = anyio.Event()
        self._is_reading = False
        self._heard_s = 0.0
        self._num_missed = 0
        self._num_reads = 0  # until then

    @property
    def remote(self) -> str:
        return self._connection.remote

    @property
    def local_host(self) -> str:
        return self._connection.local_host

    def post(self, *messages: Message) -> None:
        """Send messages, or queue them behind those posted before. Never waits.

        A peer that is gone, or does not read and so lets too many pile up, is reported by `receive`.

        Raises:
            ProtocolError: a message is larger than its kind may be.
        """
        if self._finished:
            return  # `receive` tells the owner
        if len(self._outbox) >= MAX_POSTED:
            self.abort(f"it does not read: {MAX_POSTED} messages wait for it")
            return
        self._posted_s = anyio.current_time()
        self._is_answering = False
        frame = b"".join(map(codec.encode, messages))
        if not self._outbox and len(frame) <= MAX_NOW_NBYTES:
            frame = self._connection.send_now(frame)
        if frame:
            self._outbox.append(frame)
            self._posted.set()

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Send what is posted until `finish`, `abort`, the peer's loss or cancellation; then close.

        Does not raise the loss: `receive` does, in the task that can act on it.
        """
        self._posted_s = anyio.current_time()
        task_status.started()
        try:
            with self._scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._keep_alive)
                    await self._send_all()
                    with anyio.move_on_after(LINGER_S):  # closing with unread input cuts off what we sent
                        await self._over.wait()
                    tasks.cancel_scope.cancel()
        except* (PeerLost, EndpointClosed):
            pass
        finally:
            self._finished = True
            await self._connection.aclose()

    async def _send_all(self) -> None:
        while self._outbox or not self._finished:
            if self._outbox:
                await self._connection.send_frame(self._outbox[0])
                self._outbox.popleft()
            else:
                self._posted = anyio.Event()
                await self._posted.wait()

    async def _keep_alive(self) -> None:
        """Send heartbeats when nothing else is sent, and give up a peer of which none come.

        A timer that is late may fire before what came meanwhile is read. So each heartbeat is waited for
        by itself: a pause of this process or its machine, however long, is one that did not come.
        """
        while True:
            due_s = self._next_post_s()
            if self._num_missed:  # before that, a look when we send is enough
                due_s = min(due_s, self._next_miss_s())
            self._answered = anyio.Event()
            with anyio.CancelScope(deadline=due_s):
                await self._answered.wait()  # that moves the deadline
                continue
            now_s = anyio.current_time()
            if now_s >= self._next_post_s():
                self._posted_s = now_s
                if not self._outbox:
                    self.post(Heartbeat())
            if not self._is_reading or self._connection.num_reads != self._num_reads:
                self._hear(now_s)  # the owner is busy, or a part of a message has come
            elif now_s >= self._next_miss_s():
                await self._miss(now_s)

    def _next_post_s(self) -> float:
        return self._posted_s + self._heartbeat_s * (ANSWERING if self._is_answering else 1.0)

    def _answer(self) -> None:
        """A heartbeat has come: ours goes with the same wake-up, unless something else has just gone."""
        if not self._outbox and anyio.current_time() - self._posted_s >= self._heartbeat_s / 2:
            self.post(Heartbeat())
            self._is_answering = True
            self._answered.set()

    def _hear(self, now_s: float) -> None:
        self._heard_s, self._num_missed = now_s, 0
        self._num_reads = self._connection.num_reads

    def _next_miss_s(self) -> float:
        return self._heard_s + (self._num_missed + 1) * self._heartbeat_s

    async def _miss(self, now_s: float) -> None:
        """A heartbeat did not come. After the last of them the peer is given up."""
        if now_s > self._next_miss_s() + self._heartbeat_s:  # this process stood still
            self._heard_s = now_s - (self._num_missed + 1) * self._heartbeat_s
        self._num_missed += 1
        if self._num_missed < MISSED_RENEWALS:
            return
        await anyio.sleep(LAST_LOOK_S)  # to find what has come
        if self._connection.num_reads == self._num_reads:
            lease_s = MISSED_RENEWALS * self._heartbeat_s
            self.abort(f"it was silent for {lease_s:g} s, {MISSED_RENEWALS} heartbeats")

    async def receive(self) -> Message:
        """Return the next message that is no heartbeat. Cancelled: nothing is lost.

        Raises:
            PeerLost: the peer is gone, silent for three heartbeats, or was given up by `abort`.
            ProtocolError: what it sent is no message.
            EndpointClosed: this side has closed the connection.
            WBridgeError: the class and text with which the peer rejected this side.
        """
        with self._reading():
            while True:
                self._hear(anyio.current_time())
                message = await self._connection.receive()
                if not isinstance(message, Heartbeat):
                    return message
                self._answer()

    async def deliver(self, take: Callable[[Message], None]) -> None:
        """Call `take` with each message that is no heartbeat, as it comes. Never returns.

        Cancelled: nothing is lost. Raises as `receive`, and what `take` raises.
        """
        failed: BaseException | None = None

        def pick(message: Message) -> None:
            nonlocal failed
            try:
                if isinstance(message, Heartbeat):
                    self._answer()
                else:
                    take(message)
            except BaseException as exc:  # raised again
                failed = exc
                raise

        with self._reading():
            self._hear(anyio.current_time())
            try:
                await self._connection.deliver(pick)
            except WBridgeError:
                if failed is None:
                    raise
        if failed is not None:  # not the connection's: the peer is still there
            raise failed

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            self._is_reading = True
            yield
        except ProtocolError:
            raise  # the peer is still there and can be told
        except WBridgeError as exc:
            self._over.set()
            if self._aborted:
                raise PeerLost(f"{self.remote} is given up: {self._aborted}") from exc
            raise
        finally:
            self._is_reading = False

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
