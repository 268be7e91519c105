"""How a network is let at a GPU, with fakes where the driver is called."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from wbridge.device import cuda_driver, cuda_network
from wbridge.device.cuda_driver import DriverError
from wbridge.device.cuda_network import CudaNetwork, must_flush
from wbridge.device.select import find_network
from wbridge.errors import DeviceFailed, NativeUnavailable

NONE, OWNER, ALL_DEVICES = 0, 100, 200
HOST, MEMOPS = 1, 2


@pytest.mark.parametrize(
    ("is_written", "ordering", "flushes", "expected"),
    [
        (True, ALL_DEVICES, 0, False),
        (True, OWNER, HOST, False),
        (True, NONE, HOST, True),
        (True, NONE, HOST | MEMOPS, True),
        (False, NONE, 0, False),
    ],
)
def test_the_host_flushes_what_the_gpu_does_not_order(
    is_written: bool, ordering: int, flushes: int, expected: bool
) -> None:
    assert must_flush(0, is_written=is_written, ordering=ordering, flushes=flushes) is expected


@pytest.mark.parametrize("flushes", [0, MEMOPS])
def test_a_gpu_that_neither_orders_nor_flushes_is_not_written(flushes: int) -> None:
    with pytest.raises(NativeUnavailable, match=r"cuda:3 does not order.*host memory"):
        must_flush(3, is_written=True, ordering=NONE, flushes=flushes)


@pytest.mark.parametrize(("ordering", "num_flushes"), [(NONE, 2), (OWNER, 0)])
def test_settling_flushes_if_it_must(
    ordering: int, num_flushes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    attributes = {"SUPPORTED": 1, "ORDERING": ordering, "OPTIONS": HOST}
    monkeypatch.setattr(cuda_network, "why_missing", lambda: None)
    monkeypatch.setattr(cuda_network, "attribute", lambda _, name: attributes[name.rpartition("_")[2]])
    monkeypatch.setattr(cuda_network, "entrance", lambda index: (7, index))
    monkeypatch.setattr(cuda_network, "constant", lambda _, name: name)
    monkeypatch.setattr(cuda_network, "current", lambda _: nullcontext())
    monkeypatch.setattr(cuda_network, "call", lambda name, *_: called.append(name))
    gpu = CudaNetwork(5)
    assert gpu.entrance == (7, 5)
    gpu.settle()
    gpu.settle()
    assert called == ["cuFlushGPUDirectRDMAWrites"] * num_flushes


def test_a_gpu_that_answers_no_more_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, *_: object) -> None:
        raise DriverError(f"{name} failed with CUDA_ERROR_ILLEGAL_ADDRESS")

    monkeypatch.setattr(cuda_network, "why_missing", lambda: None)
    monkeypatch.setattr(cuda_network, "attribute", lambda _, name: HOST if "FLUSH" in name else "SUP" in name)
    monkeypatch.setattr(cuda_network, "entrance", lambda index: (7, index))
    monkeypatch.setattr(cuda_network, "constant", lambda _, name: name)
    monkeypatch.setattr(cuda_network, "current", lambda _: nullcontext())
    gpu = CudaNetwork(0)
    monkeypatch.setattr(cuda_network, "call", fail)
    with pytest.raises(DeviceFailed, match=r"cuda:0.*ILLEGAL_ADDRESS.*start this process again"):
        gpu.settle()


def test_without_a_driver_the_reason_and_the_remedy_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_network, "why_missing", lambda: "no driver is installed")
    with pytest.raises(NativeUnavailable, match="no driver is installed; slots stay in host memory"):
        CudaNetwork(0)


def test_a_driver_without_the_function_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> object:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", load)
    with pytest.raises(DriverError, match=r"libcuda.so.1"):
        cuda_driver.entrance(0)


@pytest.mark.parametrize("devices", [["cpu"], ["cpu", "cuda:0"], ["cuda:0", "cuda:1"], []])
def test_tensors_that_are_not_all_on_one_gpu_are_in_nobodys_reach(devices: list[str]) -> None:
    assert find_network(devices) is None
