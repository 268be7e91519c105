"""HostMemory: page-aligned host memory, private or shared between processes."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from typing import Final

_MADV_POPULATE_WRITE: Final = 23
"""Since Linux 5.14; `mmap` does not name it."""

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class HostMemory:
    """Zeroed bytes whose pages are there when this returns. They live as long as an object that uses them."""

    def __init__(self, nbytes: int, *, shared: bool) -> None:
        self.view: memoryview = memoryview(bytearray())  # mmap accepts no empty range
        self.resources: Resources = Resources()
        if nbytes:
            mapping = _map_shared(nbytes) if shared else _map_private(nbytes)
            self.view, self.resources = memoryview(mapping), mapping.resources
            if not populate(self.view):
                ctypes.memset(_address(self.view), 0, nbytes)

    @classmethod
    def of(cls, mapping: Mapping) -> HostMemory:
        """The memory again, by what its bytes keep alive."""
        memory = cls(0, shared=False)
        memory.view, memory.resources = memoryview(mapping), mapping.resources
        return memory

    @property
    def descriptor(self) -> int | None:
        """Of shared memory: the memfd, which never shrinks, open as long as the bytes live."""
        return self.resources.descriptor


class Resources:
    """What belongs to a range of bytes and ends just before it does: attach finalizers to this."""

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = descriptor
        if descriptor is not None:
            weakref.finalize(self, os.close, descriptor)


class Mapping(mmap.mmap):
    """Keeps the resources for those who have only the bytes. It refers to nothing that refers to it, so the
    memory is given back with its last user, not when garbage is collected."""

    resources: Resources


class ForeignMemory:
    """Host memory that somebody else allocated, such as a peer's that is mapped here."""

    descriptor: Final = None

    def __init__(self, view: memoryview) -> None:
        self.resources = Resources()  # before the view, since attributes end in this order
        self.view = view


class ExportedMemory:
    """Memory of another process's GPU, not mapped here: whoever has the descriptor may open it."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        """Takes the descriptor over."""
        self.nbytes = nbytes
        self._resources = Resources(descriptor)

    @property
    def descriptor(self) -> int:
        assert self._resources.descriptor is not None
        return self._resources.descriptor


def populate(memory: memoryview) -> bool:
    """Bring the pages of a mapping in, unchanged, and let other threads run meanwhile, which `MAP_POPULATE`
    does not: a large range takes longer than a lease lasts. False: the kernel cannot."""
    if _libc.madvise(_address(memory), memory.nbytes, _MADV_POPULATE_WRITE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS):
        return False
    raise OSError(code, f"bringing in {memory.nbytes} bytes of memory: {os.strerror(code)}")


def move(target: memoryview, source: memoryview) -> None:
    """Copy all of `source`, which must be writable, without the GIL: assigning to a memoryview holds it."""
    array = ctypes.c_char * source.nbytes
    ctypes.memmove(array.from_buffer(target), array.from_buffer(source), source.nbytes)


def _map_private(nbytes: int) -> Mapping:
    mapping = Mapping(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.resources = Resources()
    return mapping


def _map_shared(nbytes: int) -> Mapping:
    resources = Resources(os.memfd_create("wbridge", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    assert resources.descriptor is not None
    os.ftruncate(resources.descriptor, nbytes)
    fcntl.fcntl(resources.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    mapping = Mapping(resources.descriptor, nbytes, flags=mmap.MAP_SHARED)
    mapping.resources = resources
    return mapping


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
