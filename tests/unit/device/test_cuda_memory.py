"""GpuMemory, with a driver that only notes what it is asked: all that is opened is closed again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from wbridge.device import cuda_memory
from wbridge.device.cuda_driver import DriverError
from wbridge.device.cuda_memory import GpuMemory
from wbridge.errors import ConfigError

GRANULARITY = 2**21


class Driver:
    """Answers calls; those named in `failing` fail that often."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failing: dict[str, int] = {}
        self.mapped: dict[int, int] = {}
        self.num_reserved = 0
        self.num_handles = 0

    def call(self, name: str, *arguments: object) -> object:
        self.calls.append(name)
        if self.failing.get(name, 0) > 0:
            self.failing[name] -= 1
            raise DriverError(f"{name} failed with CUDA_ERROR_OUT_OF_MEMORY")
        return getattr(self, name)(*arguments)

    def cuMemCreate(self, size: int, *_: object) -> object:  # noqa: N802  # the driver's names
        self.num_handles += 1
        return SimpleNamespace(size=size)

    def cuMemRelease(self, handle: object) -> None:  # noqa: N802
        self.num_handles -= 1

    def cuMemExportToShareableHandle(self, *_: object) -> int:  # noqa: N802
        return os.memfd_create("exported")

    def cuMemImportFromShareableHandle(self, *_: object) -> object:  # noqa: N802
        return self.cuMemCreate(0)

    def cuMemGetAllocationPropertiesFromHandle(self, _: object) -> object:  # noqa: N802
        return SimpleNamespace(location=SimpleNamespace(id=1))

    def cuMemAddressReserve(self, *_: object) -> int:  # noqa: N802
        self.num_reserved += 1
        return self.num_reserved * 2**30

    def cuMemMap(self, address: int, size: int, *_: object) -> None:  # noqa: N802
        assert address not in self.mapped
        self.mapped[address] = size

    def cuMemSetAccess(self, *_: object) -> None:  # noqa: N802
        return

    def cuMemUnmap(self, address: int, size: int) -> None:  # noqa: N802
        assert self.mapped.pop(address) == size


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    found = Driver()

    @contextmanager
    def current(index: int) -> Iterator[None]:
        assert index == 1
        yield

    monkeypatch.setattr(cuda_memory, "call", found.call)
    monkeypatch.setattr(cuda_memory, "current", current)
    monkeypatch.setattr(cuda_memory, "constant", lambda *names: names)
    monkeypatch.setattr(cuda_memory, "struct", lambda name: SimpleNamespace(location=SimpleNamespace()))
    monkeypatch.setattr(cuda_memory, "_properties", lambda index: None)
    monkeypatch.setattr(cuda_memory, "_granularity", lambda index: GRANULARITY)
    monkeypatch.setattr(cuda_memory, "_RANGES", cuda_memory._Ranges())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: found.calls.append("empty_cache"))
    descriptors = num_open()
    yield found
    assert not found.mapped and not found.num_handles
    assert num_open() == descriptors


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_ranges_of_addresses_are_used_again_by_what_has_their_size(driver: Driver) -> None:
    """They are never given back to the driver: torch's own memory failed some time after."""
    first, other = GpuMemory.allocate(1, 5), GpuMemory.allocate(1, GRANULARITY + 1)
    address, size = first.address, driver.mapped[first.address]
    assert size == GRANULARITY
    assert driver.mapped[other.address] == 2 * GRANULARITY
    del first
    assert address not in driver.mapped
    assert first_address(driver) == address, "also for memory of others"
    del other
    assert driver.num_reserved == 2
    assert "cuMemAddressFree" not in driver.calls


def first_address(driver: Driver) -> int:
    descriptor = os.memfd_create("of a peer")
    try:
        opened = GpuMemory.open(1, descriptor, 7)
        os.fstat(descriptor)  # it stays the caller's
        return opened.address
    finally:
        os.close(descriptor)


def test_addresses_keep_the_memory(driver: Driver) -> None:
    memory = GpuMemory.allocate(1, 100)
    addresses, descriptor = memory.addresses[10:20], memory.descriptor
    assert descriptor is not None and not os.get_inheritable(descriptor)
    del memory
    assert driver.mapped
    os.fstat(descriptor)
    del addresses
    assert not driver.mapped
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


@pytest.mark.parametrize("step", ["cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"])
def test_memory_that_cannot_be_mapped_leaves_nothing(driver: Driver, step: str) -> None:
    """Neither memory nor descriptor; the fixture looks."""
    driver.failing[step] = 1
    with pytest.raises(DriverError, match=step):
        GpuMemory.allocate(1, 100)
    assert GpuMemory.allocate(1, 100).address
    assert driver.num_reserved == 1, "the range is used again"


def test_room_is_asked_of_torch_before_an_allocation_fails(driver: Driver) -> None:
    driver.failing["cuMemCreate"] = 1
    assert GpuMemory.allocate(1, 100).address
    assert driver.calls[:3] == ["cuMemCreate", "empty_cache", "cuMemCreate"]
    driver.failing["cuMemCreate"] = 2
    with pytest.raises(ConfigError, match=f"cuda:1 has no {GRANULARITY} bytes left: .*OUT_OF_MEMORY; set a"):
        GpuMemory.allocate(1, 100)
