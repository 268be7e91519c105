"""The device is the one that the parameters are on, whichever thread opens it."""

from __future__ import annotations

import pytest

from wbridge.device import cuda
from wbridge.device.cpu import CpuDevice
from wbridge.device.select import open_device
from wbridge.errors import ConfigError


@pytest.mark.parametrize(("tensor_device", "index"), [("cuda:3", 3), ("cuda:0", 0), ("cuda", None)])
def test_a_gpu_keeps_its_index(
    tensor_device: str, index: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of an adapter has a current GPU of its own: always the first."""
    opened: list[int | None] = []
    monkeypatch.setattr(cuda, "CudaDevice", opened.append)
    open_device(tensor_device)
    assert opened == [index]


def test_others_are_the_host_or_unknown() -> None:
    assert isinstance(open_device("cpu"), CpuDevice)
    with pytest.raises(ConfigError, match=r"'meta'.*knows cpu and cuda"):
        open_device("meta")
