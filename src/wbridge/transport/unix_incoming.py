"""UnixIncoming: the connection of one writer, read by callbacks of the loop."""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Final

from wbridge.device.base import Buffer
from wbridge.errors import ProtocolError
from wbridge.transport.base import Message
from wbridge.transport.inbox import Inbox
from wbridge.transport.unix_frames import (
    MAX_FRAME_NBYTES,
    Frame,
    Notification,
    Payload,
    decode,
    decode_hello,
    encode,
)

_MAX_UNREAD: Final = 64
"""Messages of one writer that may lie in the inbox; further ones stay in the socket, which is bounded."""
_PACKETS_PER_CALL: Final = 16
_CREDENTIALS: Final = struct.Struct("3i")
"""struct ucred: process, user, group."""
HELLO_S: Final = 10.0
"""Who has not shown the secret after this time is cut off."""

_log = logging.getLogger(__name__)


class UnixIncoming:
    """Takes messages and notifications of one writer, once it has shown the secret."""

    def __init__(
        self,
        connection: socket.socket,
        *,
        secret: bytes,
        inbox: Inbox,
        let_in: Callable[[UnixIncoming], None],
        arrived: Callable[[Notification], None],
        ended: Callable[[UnixIncoming], None],
    ) -> None:
        self._socket = connection
        self._secret = secret
        self._inbox = inbox
        self._let_in, self._arrived, self._ended = let_in, arrived, ended
        self._loop = asyncio.get_running_loop()
        self.peer: str = ""
        """Its name, once it is in."""
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self.pid: int = _CREDENTIALS.unpack(credentials)[0]
        """0: it is of another namespace."""
        self._num_unread = 0
        self._unsent: deque[tuple[bytes, tuple[int, ...], Buffer | None]] = deque()
        self._deadline = self._loop.call_later(HELLO_S, self.close)
        connection.setblocking(False)
        self._loop.add_reader(connection, self._read)

    @property
    def is_in(self) -> bool:
        return bool(self.peer)

    def post(self, frame: Frame, *descriptors: int, of: Buffer | None = None) -> None:
        """Send a frame behind the earlier ones; the buffer keeps its descriptors open until then."""
        self._unsent.append((encode(frame), descriptors, of))
        self._write()

    def close(self) -> None:
        """Idempotent."""
        if self._socket.fileno() != -1:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
            self._deadline.cancel()
            self._unsent.clear()
            self._ended(self)

    def _write(self) -> None:
        try:
            while self._unsent:
                packet, descriptors, _ = self._unsent[0]
                socket.send_fds(self._socket, [packet], descriptors, socket.MSG_NOSIGNAL)
                self._unsent.popleft()
        except BlockingIOError:
            self._loop.add_writer(self._socket, self._write)
            return
        except OSError:
            self.close()
            return
        self._loop.remove_writer(self._socket)

    def _read(self) -> None:
        for _ in range(_PACKETS_PER_CALL):
            try:
                packet = self._socket.recv(MAX_FRAME_NBYTES)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self.close()
                return
            try:
                self._take(packet)
            except ProtocolError as exc:  # nobody waits for this callback; the writer finds itself cut off
                _log.warning("a writer breaks the protocol", extra={"writer": self.peer, "why": str(exc)})
                self.close()
                return
            if self._num_unread >= _MAX_UNREAD:
                self._loop.remove_reader(self._socket)
                return

    def _take(self, packet: bytes) -> None:
        if not self.is_in:
            hello = decode_hello(packet)
            if hello is None or not hmac.compare_digest(hello.secret, self._secret):
                self.close()  # a stranger
                return
            self._deadline.cancel()
            self.peer = hello.name
            self._let_in(self)
            return
        match decode(packet, self.peer):
            case Payload(payload):
                self._deliver(payload)
            case Notification(_, _, payload) as notification:
                self._arrived(notification)
                self._deliver(payload)
            case _:
                raise ProtocolError(f"{self.peer} sent a frame that only a receiver sends")

    def _deliver(self, payload: bytes) -> None:
        self._num_unread += 1
        self._inbox.post(Message(self.peer, payload), self._taken)

    def _taken(self) -> None:
        self._num_unread -= 1
        if self._num_unread == _MAX_UNREAD // 2 and self._socket.fileno() != -1:
            self._loop.add_reader(self._socket, self._read)
