"""Choose the device for where the parameters live."""

from __future__ import annotations

from wbridge.device.base import Device
from wbridge.device.cpu import CpuDevice
from wbridge.errors import ConfigError


def open_device(tensor_device_type: str, *, copy_threads: int = 0) -> Device:
    """Open the device for tensors whose `tensor.device.type` this is; whoever opens it closes it.

    `copy_threads` bounds the threads of one copy on the host; 0 leaves the bound as it is.

    Raises:
        ConfigError: wbridge has no such device.
        NativeUnavailable: the device's software is not installed.
    """
    if tensor_device_type == "cpu":
        return CpuDevice(copy_threads=copy_threads)
    if tensor_device_type == "cuda":
        from wbridge.device.cuda import CudaDevice  # asks for a GPU that most callers do not have

        return CudaDevice()
    raise ConfigError(f"parameters on {tensor_device_type!r}: wbridge knows cpu and cuda; move them to one")
