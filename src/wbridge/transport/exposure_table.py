"""ExposureTable: which exposed slots of shared memory still wait for their one put; both processes see it.

Each entry is a word in shared memory, and a lock on the file behind it. The word names the exposure; a writer
holds the lock while it writes. The kernel drops the locks of a process that dies, which is the proof that it
writes no more.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
import weakref
from typing import Final

NUM_ENTRIES: Final = 1 << 20
"""One for each piece whose slot is exposed; memory is taken only for those that are used."""
WORD_NBYTES: Final = 8
TABLE_NBYTES: Final = NUM_ENTRIES * WORD_NBYTES
NOT_EXPOSED: Final = 0

_FLOCK: Final = "hhlli4x"
"""struct flock on 64-bit Linux: type, whence, start, length, process (0 for locks of an open file)."""


# A child of a fork holds all files of its parent, which would keep the parent's locks beyond its death.
_open_tables: Final = weakref.WeakSet["ExposureTable"]()


class ExposureTable:
    """One process's access to a table. Each process opens the file anew: locks belong to the opening."""

    def __init__(self, descriptor: int) -> None:
        """`descriptor` stays the caller's."""
        self._file = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            self._memory = mmap.mmap(self._file, TABLE_NBYTES)
        except BaseException:  # whatever it is, the file does not stay open; raised again
            os.close(self._file)
            raise
        self._words = memoryview(self._memory).cast("Q")
        _open_tables.add(self)

    def set(self, entry: int, word: int) -> None:
        """Expose."""
        self._words[entry] = word

    def take_back(self, entry: int) -> None:
        """Nobody may begin to write this exposure any more. Under the lock."""
        self._words[entry] = NOT_EXPOSED

    def holds(self, entry: int, word: int) -> bool:
        return self._words[entry] == word

    def try_lock(self, entry: int) -> bool:
        """Whether this process has the entry to itself now."""
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _lock(fcntl.F_WRLCK, entry))
        except OSError as exc:
            if exc.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def unlock(self, entry: int) -> None:
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _lock(fcntl.F_UNLCK, entry))

    def close(self) -> None:
        """Drop the locks taken here. Idempotent."""
        if not self._memory.closed:
            self._words.release()
            self._memory.close()
            os.close(self._file)


def _close_in_child() -> None:
    for table in list(_open_tables):
        table.close()


os.register_at_fork(after_in_child=_close_in_child)


def _lock(kind: int, entry: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, entry * WORD_NBYTES, WORD_NBYTES, 0)
