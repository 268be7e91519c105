"""The device is the one that the parameters are on, whichever thread opens it."""

from __future__ import annotations

import pytest

from wbridge.device import cuda
from wbridge.device.base import HOST, Access
from wbridge.device.cpu import CpuDevice
from wbridge.device.select import find_access, home_of, open_device
from wbridge.errors import ConfigError


@pytest.mark.parametrize(("tensor_device", "index"), [("cuda:3", 3), ("cuda:0", 0), ("cuda", None)])
def test_a_gpu_keeps_its_index(
    tensor_device: str, index: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of an adapter has a current GPU of its own: always the first."""
    opened: list[tuple[int | None, int]] = []
    monkeypatch.setattr(cuda, "CudaDevice", lambda index, copy_threads: opened.append((index, copy_threads)))
    open_device(tensor_device, copy_threads=2)
    assert opened == [(index, 2)]


def test_others_are_the_host_or_unknown() -> None:
    assert isinstance(open_device("cpu"), CpuDevice)
    with pytest.raises(ConfigError, match=r"'meta'.*knows cpu and cuda"):
        open_device("meta")


def test_gpu_memory_is_reached_only_where_all_tensors_are_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = Access(memory="GPU a", writes=(HOST, "GPU a"))
    monkeypatch.setattr(cuda, "find_access", {"cuda:1": on_gpu}.__getitem__)
    assert find_access(["cuda:1", "cuda:1"]) == on_gpu
    assert find_access(["cuda:1", "cpu"]) == find_access(["cuda:0", "cuda:1"]) == Access(memory="")
    assert find_access(["cpu"]) == find_access([]) == Access(memory=HOST, writes=(HOST,))


def test_streams_are_those_of_the_one_gpu_whatever_lies_on_the_host() -> None:
    """For a stream of the host a copy on a GPU is over when it has been launched."""
    assert home_of(["cpu", "cuda:1", "cpu"]) == home_of(["cuda:1"]) == "cuda:1"
    assert home_of(["cpu"]) == home_of([]) == "cpu"
    assert home_of(["cpu", "meta"]) == "meta"


def test_parameters_on_several_gpus_are_refused() -> None:
    """No stream of one orders what happens on the other."""
    with pytest.raises(ConfigError, match=r"parameters on cuda:0 and cuda:1: a worker has one GPU"):
        home_of(["cuda:1", "cpu", "cuda:0"])
