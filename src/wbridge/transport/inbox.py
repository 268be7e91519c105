"""Inbox: a bounded queue of messages that any loop may fill and one loop empties."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final

import anyio
from anyio.abc import ObjectReceiveStream

from wbridge.device.wakeup import Wakeup
from wbridge.errors import PeerLost
from wbridge.transport.base import Message

CAPACITY: Final = 256


class Inbox(ObjectReceiveStream[Message]):
    """Delivery waits while `capacity` messages lie unread: the bound is the back-pressure.

    `deliver` may be called on any event loop, `receive` on one at a time.
    """

    def __init__(self, owner: str, capacity: int = CAPACITY) -> None:
        self._owner = owner
        self._capacity = capacity
        self._lock = threading.Lock()
        self._messages: deque[tuple[Message, Callable[[], None] | None]] = deque()
        self._num_reserved = 0
        self._senders: deque[_Turn] = deque()
        self._reader: Wakeup | None = None
        self._take: Callable[[Message], None] | None = None  # while `attend` runs, on its loop:
        self._thread = 0
        self._failure: BaseException | None = None
        self._closed = False

    async def receive(self) -> Message:
        """Return the next message. Cancelled: takes none.

        Raises:
            anyio.EndOfStream: the transport was closed and everything was read.
        """
        while True:
            with self._lock:
                if self._messages:
                    message, on_taken = self._messages.popleft()
                    self._admit()
                    break
                if self._failure is not None:
                    raise self._failure
                if self._closed:
                    raise anyio.EndOfStream
                reader = self._reader = Wakeup()
            await reader.wait()
        if on_taken is not None:
            on_taken()
        return message

    async def attend(self, take: Callable[[Message], None]) -> None:
        """Call `take` with each message until the transport is closed: at once when it comes, if it is posted
        on this loop. Raises what `take` raises."""
        self._take, self._thread = take, threading.get_ident()
        try:
            async for message in self:
                take(message)
        finally:
            self._take = None

    async def deliver(self, message: Message) -> None:
        """Append `message` once there is room. Cancelled: the message is not delivered.

        Raises:
            PeerLost: the owner closed its inbox.
        """
        turn = None
        with self._lock:
            self._check_open()
            if self._senders or len(self._messages) + self._num_reserved >= self._capacity:
                turn = _Turn()
                self._senders.append(turn)
            else:
                self._append(message)
        if turn is None:
            return
        try:
            await turn.wakeup.wait()
        except BaseException:
            with self._lock:
                self._give_up(turn)
            raise
        with self._lock:
            self._num_reserved -= turn.admitted
            self._check_open()
            self._append(message)

    def post(self, message: Message, on_taken: Callable[[], None]) -> None:
        """Append at once, for a transport that bounds its senders itself; `on_taken` when it is read."""
        take = self._take
        with self._lock:
            if self._closed:
                return
            if take is None or self._messages or self._failure or threading.get_ident() != self._thread:
                self._messages.append((message, on_taken))
                self._wake_reader()
                return
        try:
            take(message)
        except BaseException as exc:  # whatever it is, `attend` raises it
            with self._lock:
                self._failure = exc
                self._wake_reader()
        on_taken()

    def close(self) -> None:
        """Refuse further messages and end `receive` once the unread ones are taken. Idempotent."""
        with self._lock:
            self._closed = True
            self._wake_reader()
            while self._senders:
                self._senders.popleft().wakeup.set()

    async def aclose(self) -> None:
        self.close()

    def _append(self, message: Message) -> None:
        self._messages.append((message, None))
        self._wake_reader()

    def _wake_reader(self) -> None:
        if self._reader is not None:
            self._reader.set()
            self._reader = None

    def _admit(self) -> None:
        """Reserve the freed room for the sender that has waited longest."""
        while self._senders and len(self._messages) + self._num_reserved < self._capacity:
            turn = self._senders.popleft()
            turn.admitted = True
            self._num_reserved += 1
            turn.wakeup.set()

    def _give_up(self, turn: _Turn) -> None:
        if turn.admitted:
            self._num_reserved -= 1
            self._admit()
        elif turn in self._senders:
            self._senders.remove(turn)

    def _check_open(self) -> None:
        if self._closed:
            raise PeerLost(f"{self._owner} closed its transport; reconnect, or go on without it")


class _Turn:
    """A sender in the queue for room."""

    def __init__(self) -> None:
        self.wakeup = Wakeup()
        self.admitted = False
