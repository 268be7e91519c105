"""CudaNetwork: a GPU whose memory a network reads and writes, without a copy in the host's memory."""

from __future__ import annotations

from typing import Final

from wbridge.device.cuda_driver import DriverError, attribute, call, constant, current, entrance, why_missing
from wbridge.errors import DeviceFailed, NativeUnavailable

_SUPPORTED: Final = "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED"
_ORDERING: Final = "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING"
_FLUSHES: Final = "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS"
_FOR_ITS_OWNER: Final = 100
"""CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER: work on this GPU sees what was written before its submission."""
_BY_THE_HOST: Final = 1
"""CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST: `cuFlushGPUDirectRDMAWrites` does something."""


class CudaNetwork:
    """Implements `NetworkedGpu` for the GPU with this number.

    Raises:
        NativeUnavailable: the driver is missing, or nothing shows the GPU what a network card has written.
    """

    def __init__(self, index: int) -> None:
        if (reason := why_missing()) is not None:
            raise NativeUnavailable(
                f"cuda:{index}: no network reads or writes its memory: {reason}; slots stay in host memory"
            )
        try:
            self._must_flush = must_flush(
                index,
                is_written=bool(attribute(index, _SUPPORTED)),
                ordering=attribute(index, _ORDERING),
                flushes=attribute(index, _FLUSHES),
            )
            self._index = index
            self._entrance = entrance(index)
        except DriverError as exc:
            raise NativeUnavailable(f"cuda:{index}: no network can be let in: {exc}") from exc

    @property
    def entrance(self) -> tuple[int, int]:
        return self._entrance

    def settle(self) -> None:
        """See `NetworkedGpu.settle`. Blocks for some microseconds where the GPU orders no such writes."""
        if not self._must_flush:
            return
        try:
            with current(self._index):
                call(
                    "cuFlushGPUDirectRDMAWrites",
                    constant(
                        "CUflushGPUDirectRDMAWritesTarget",
                        "CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX",
                    ),
                    constant("CUflushGPUDirectRDMAWritesScope", "CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER"),
                )
        except DriverError as exc:
            raise DeviceFailed(f"cuda:{self._index}: {exc}; start this process again") from exc


def must_flush(index: int, *, is_written: bool, ordering: int, flushes: int) -> bool:
    """Whether the host has to flush what network cards write before work on the GPU reads it.

    `is_written`: cards write its memory at all; what UCX copies is there when its copies are over.

    Raises:
        NativeUnavailable: it would have to and cannot.
    """
    if not is_written or ordering >= _FOR_ITS_OWNER:
        return False
    if flushes & _BY_THE_HOST:
        return True
    raise NativeUnavailable(
        f"cuda:{index} does not order what network cards write, and the host cannot flush it; slots stay in "
        "host memory"
    )
