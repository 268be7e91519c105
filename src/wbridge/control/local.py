"""LocalLease: a `LeasedConnection` between two tasks of one loop, without a socket, never silent."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TypeAlias

import anyio

from wbridge.control.connection import rebuild_error
from wbridge.control.lease import LeasedConnection
from wbridge.control.messages import Message, Rejected
from wbridge.errors import PeerLost, WBridgeError


class LocalLease:
    """One of the two ends that `local_pair` makes: see `LeasedConnection`, whose methods these are.

    What is posted is taken in order, and never while its sender runs.
    """

    def __init__(self, remote: str) -> None:
        self.remote: str = remote
        self.local_host: str = "127.0.0.1"
        self._peer: LocalLease
        self._inbox: deque[Message] = deque()
        self._news = anyio.Event()  # for `receive`, and for the end of `deliver`
        self._take: Callable[[Message], None] | None = None  # while `deliver` runs
        self._is_due = False  # `_take_all` is about to run
        self._end: BaseException  # of `deliver`
        self._finished = False
        self._aborted = ""

    def post(self, *messages: Message) -> None:
        if not self._finished:
            self._peer._inbox.extend(messages)
            self._peer._wake()

    async def run(self) -> None:
        """There is nothing to send: what is posted has arrived."""

    async def receive(self) -> Message:
        while (message := self._next()) is None:
            self._news = anyio.Event()
            await self._news.wait()
        return message

    async def deliver(self, take: Callable[[Message], None]) -> None:
        self._take, self._news = take, anyio.Event()
        self._wake()
        try:
            await self._news.wait()
        finally:
            self._take = None
        raise self._end

    async def wait_lost(self) -> None:
        try:
            while True:
                await self.receive()
        except WBridgeError:
            return

    def finish(self) -> None:
        self._finished = True
        self._peer._wake()

    def abort(self, reason: str) -> None:
        self._aborted = self._aborted or reason
        self._wake()
        self.finish()

    async def __aenter__(self) -> LocalLease:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort("this side has left")

    def _wake(self) -> None:
        if self._take is None:
            self._news.set()
        elif not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._take_all)

    def _take_all(self) -> None:
        self._is_due = False
        try:
            while self._take is not None and (message := self._next()) is not None:
                self._take(message)
        except BaseException as exc:  # whatever it is, `deliver` raises it
            self._take, self._end = None, exc
            self._news.set()

    def _next(self) -> Message | None:
        """Take the next message; None if there is none yet. Raises what ends `receive`."""
        if self._aborted:
            raise PeerLost(f"{self.remote} is given up: {self._aborted}")
        if not self._inbox:
            if self._peer._finished:
                raise PeerLost(f"{self.remote} is gone: it closed the connection")
            return None
        message = self._inbox.popleft()
        if isinstance(message, Rejected):
            raise rebuild_error(message)
        return message


Lease: TypeAlias = LeasedConnection | LocalLease
"""Either end of what connects a member and its coordinator."""


def local_pair(near: str, far: str) -> tuple[LocalLease, LocalLease]:
    """Return both ends, the one at `near` first."""
    ends = LocalLease(far), LocalLease(near)
    ends[0]._peer, ends[1]._peer = ends[1], ends[0]
    return ends
