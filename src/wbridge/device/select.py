"""Choose the device for where the parameters live."""

from __future__ import annotations

from collections.abc import Iterable

from wbridge.device.base import Access, Device, NetworkedGpu
from wbridge.device.cpu import CpuDevice
from wbridge.errors import ConfigError, NativeUnavailable


def open_device(tensor_device: str, *, copy_threads: int = 0) -> Device:
    """Open the device for tensors whose `str(tensor.device)` this is; whoever opens it closes it.

    A bare `cuda` is the calling thread's current GPU; threads begin with the first one. `copy_threads`
    bounds the threads of one copy on the host; 0 leaves the bound as it is.

    Raises:
        ConfigError: wbridge has no such device.
        NativeUnavailable: the device's software is not installed.
    """
    kind, _, index = tensor_device.partition(":")
    if kind == "cpu":
        return CpuDevice(copy_threads=copy_threads)
    if kind == "cuda":
        from wbridge.device.cuda import CudaDevice  # asks for a GPU that most callers do not have

        return CudaDevice(int(index) if index else None, copy_threads=copy_threads)
    raise ConfigError(f"parameters on {tensor_device!r}: wbridge knows cpu and cuda; move them to one")


def find_gpu_limits() -> list[str]:
    """Return what updates on the calling thread's GPU do without, and why.

    Raises:
        NativeUnavailable: there is no GPU that torch can use.
    """
    from wbridge.device.cuda import CudaDevice  # as above
    from wbridge.device.cuda_driver import why_no_rings
    from wbridge.device.cuda_memory import why_not_shared

    reasons = {
        "slots are in host memory": why_not_shared(CudaDevice().index),
        "the event loop looks again and again whether it is done": why_no_rings(),
    }
    return [f"{limit}: {why}" for limit, why in reasons.items() if why is not None]


def why_no_network() -> str | None:
    """Say why no network reads and writes the memory of the calling thread's GPU; None if one can.

    Raises:
        NativeUnavailable: there is no GPU that torch can use.
    """
    from wbridge.device.cuda import CudaDevice  # as above
    from wbridge.device.cuda_network import CudaNetwork

    index = CudaDevice().index
    try:
        CudaNetwork(index)
    except NativeUnavailable as exc:
        return str(exc)
    return None


def home_of(tensor_devices: Iterable[str]) -> str:
    """Return the device whose streams order a worker's copies: its GPU if tensors are there, else the host.

    Raises:
        ConfigError: there are several. A stream orders nothing on another GPU.
    """
    others = sorted(set(tensor_devices) - {"cpu"})
    if len(others) > 1:
        raise ConfigError(
            f"parameters on {' and '.join(others)}: a worker has one GPU; run one worker for each, and "
            "describe to each only the parameters on its own"
        )
    return others[0] if others else "cpu"


def find_access(tensor_devices: Iterable[str]) -> Access:
    """Return where the device memory of a worker with tensors on these devices lies, and what it can write.

    With tensors in several places other workers do not get at its device memory, nor it at theirs.
    """
    names = set(tensor_devices)
    if not any(name.startswith("cuda") for name in names):
        return Access()
    if len(names) > 1:
        return Access(memory="")
    from wbridge.device.cuda import find_access as access_of_gpu  # as above

    return access_of_gpu(names.pop())


def find_network(tensor_devices: Iterable[str]) -> NetworkedGpu | None:
    """Return how a network gets at the memory of the GPU that all tensors are on; None if it does not."""
    names = set(tensor_devices)
    if len(names) != 1 or not all(name.startswith("cuda") for name in names):
        return None
    from wbridge.device.cuda import CudaDevice  # as above
    from wbridge.device.cuda_network import CudaNetwork

    _, _, index = names.pop().partition(":")
    try:
        return CudaNetwork(CudaDevice(int(index) if index else None).index)
    except NativeUnavailable:
        return None  # `why_no_network` says it
