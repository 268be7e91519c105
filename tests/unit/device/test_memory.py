"""Memory of the host: what waits for it, and when it goes."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import weakref

import pytest
import torch

from wbridge.device import memory as memory_module
from wbridge.device.memory import HostMemory, populate


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("is_new_kernel", [True, False])
def test_its_pages_are_there_and_zero(
    shared: bool, is_new_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_new_kernel:
        monkeypatch.setattr(memory_module, "_MADV_POPULATE_WRITE", 999)
    memory = HostMemory(5 * mmap.PAGESIZE + 1, shared=shared)
    present = (ctypes.c_ubyte * 6)()
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory.view))
    assert (
        ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(memory.view)), present) == 0
    )
    assert list(present) == [1] * 6
    assert not any(memory.view)


def test_populating_is_a_call_that_lets_other_threads_run_and_changes_nothing() -> None:
    """`mmap` itself keeps the interpreter to itself while it brings pages in: seconds, for a large ring."""
    assert isinstance(memory_module._libc, ctypes.CDLL)
    assert not isinstance(memory_module._libc, ctypes.PyDLL)
    memory = HostMemory(mmap.PAGESIZE, shared=True)
    memory.view[:3] = b"abc"
    populate(memory.view)
    assert bytes(memory.view[:3]) == b"abc"


@pytest.mark.parametrize("shared", [False, True])
def test_it_goes_with_its_last_user_and_not_before(shared: bool) -> None:
    """Rings are large, and the next epoch's comes before garbage is collected."""
    gc.disable()
    try:
        num_open = len(os.listdir("/proc/self/fd"))
        memory = HostMemory(mmap.PAGESIZE, shared=shared)
        mapping, resources = weakref.ref(memory.view.obj), weakref.ref(memory.resources)
        tensor = torch.frombuffer(memory.view, dtype=torch.uint8)
        del memory
        assert mapping() is not None
        assert resources() is not None
        assert int(tensor.sum()) == 0
        del tensor
        assert mapping() is None
        assert resources() is None
        assert len(os.listdir("/proc/self/fd")) == num_open
    finally:
        gc.enable()


def test_nothing_is_mapped_for_no_bytes() -> None:
    memory = HostMemory(0, shared=True)
    assert memory.descriptor is None
    assert memory.view.nbytes == 0
