"""HostMemory: page-aligned host memory, private or shared between processes."""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from typing import Final


class HostMemory:
    """Zeroed bytes whose pages are there when this returns. They live as long as an object that uses them."""

    def __init__(self, nbytes: int, *, shared: bool) -> None:
        self.descriptor: int | None = None
        """Of shared memory: the memfd, which never shrinks, open as long as this object lives."""
        visibility = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        if shared and nbytes:
            self.descriptor = os.memfd_create("wbridge", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            weakref.finalize(self, os.close, self.descriptor)
            os.ftruncate(self.descriptor, nbytes)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            visibility = mmap.MAP_SHARED
        if nbytes:
            file = -1 if self.descriptor is None else self.descriptor
            self._mapping = _Mapping(file, nbytes, flags=visibility | mmap.MAP_POPULATE)
            self.view: memoryview = memoryview(self._mapping)
        else:  # mmap accepts no empty range
            self.view = memoryview(bytearray())

    def live_with_its_bytes(self) -> None:
        """Stay alive, with the descriptor, for as long as somebody uses the bytes."""
        self._mapping.owner = self  # a cycle, which the garbage collector finds


class _Mapping(mmap.mmap):
    """A mapping that can keep its owner alive."""

    owner: HostMemory


class ForeignMemory:
    """Host memory that somebody else allocated, such as a peer's that is mapped here."""

    descriptor: Final = None

    def __init__(self, view: memoryview) -> None:
        self.view = view
