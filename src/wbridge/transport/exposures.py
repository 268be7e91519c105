"""Exposures: which memory peers may write, each piece once."""

from __future__ import annotations

import os
import threading
from typing import Final

from wbridge.device.wakeup import Wakeup
from wbridge.errors import ProtocolError
from wbridge.transport.base import RemoteSlot

_TOKEN_NBYTES: Final = 16


class Exposures:
    """Exposed memory by token. `begin` takes it for one writer; any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[bytes, memoryview] = {}
        self._writing: dict[bytes, list[Wakeup]] = {}
        self._doubtful: set[bytes] = set()

    def expose(self, memory: memoryview) -> RemoteSlot:
        if memory.readonly or not memory.c_contiguous:
            raise ProtocolError("exposed memory must be writable and contiguous; expose a slot's own view")
        token = os.urandom(_TOKEN_NBYTES)
        with self._lock:
            self._open[token] = memory.cast("B") if memory.nbytes else memoryview(bytearray())
        return RemoteSlot(token, memory.nbytes)

    @staticmethod
    def withdrawn(nbytes: int) -> RemoteSlot:
        """Return a slot that was taken back before anybody could write it."""
        return RemoteSlot(os.urandom(_TOKEN_NBYTES), nbytes)

    def begin(self, token: bytes, nbytes: int) -> memoryview | None:
        """Take the memory for one write, until `finish`. None: withdrawn, or written before.

        Raises:
            ProtocolError: the write is not as long as the slot; the slot stays exposed.
        """
        with self._lock:
            memory = self._open.get(token)
            if memory is None:
                return None
            if memory.nbytes != nbytes:
                raise ProtocolError(
                    f"a put of {nbytes} bytes into a slot of {memory.nbytes} bytes: put the whole slot"
                )
            del self._open[token]
            self._writing[token] = []
            return memory

    def finish(self, token: bytes) -> None:
        """The write has stopped, whether whole or not."""
        with self._lock:
            waiters = self._writing.pop(token, [])
            self._doubtful.discard(token)
        for wakeup in waiters:
            wakeup.set()

    def doubt(self, token: bytes) -> None:
        """The writer is out of reach, and nothing proves that its write has stopped."""
        with self._lock:
            if token not in self._writing:
                return
            self._doubtful.add(token)
            waiters, self._writing[token] = self._writing[token], []
        for wakeup in waiters:
            wakeup.set()

    async def withdraw(self, remote: RemoteSlot) -> bool:
        """Take a slot back: at once if nobody writes it, else once the write has stopped.

        False: the writer is lost in the middle. Cancelled: the slot counts as written.
        """
        with self._lock:
            if self._open.pop(remote.token, None) is not None or remote.token not in self._writing:
                return True
            if remote.token in self._doubtful:
                return False
            wakeup = Wakeup()
            self._writing[remote.token].append(wakeup)
        await wakeup.wait()
        return remote.token not in self._doubtful
