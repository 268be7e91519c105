"""KernelTable: one launch of the strided kernel for all rows of one GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from wbridge.device.base import Buffer
from wbridge.device.cuda_stream import upload
from wbridge.device.kernels.descriptors import build_descriptors
from wbridge.device.kernels.program import import_core, launch, load_kernel
from wbridge.device.tables import Residence, Row, TorchTable
from wbridge.errors import InternalError

_WARPS_PER_BLOCK: Final = 8
_ALIGNMENT: Final = 16
_MAX_HOST_BLOCKS: Final = 32
"""Of a copy to or from host memory: enough to fill the bus, and most processors are left to others."""


class KernelTable:
    """Rows of one GPU, run on torch's current stream of that GPU. The slot is there or in pinned host memory.

    A run neither allocates nor waits.

    Raises:
        NativeUnavailable: the kernel cannot be had on this GPU.
    """

    def __init__(self, rows: Sequence[Row], *, into_slot: bool) -> None:
        self._rows = rows
        self._into_slot = into_slot
        self._residence = Residence([row.tensor for row in rows])
        self._index = rows[0].tensor.device.index
        self._kernel = load_kernel(self._index)
        table = build_descriptors(rows, into_slot=into_slot)
        self._num_tiles = table.num_tiles
        self._memory = upload(table.memory, self._index)
        copies = self._memory.data_ptr()
        self._addresses = (copies, copies + table.loops_offset, copies + table.tiles_offset)
        self._slots: dict[int, tuple[Buffer, int, Any]] = {}  # each version of cuda.core has its LaunchConfig
        self._twin: TorchTable | None = None

    def run(self, buffer: Buffer, base: int) -> None:
        self._residence.check()
        start, config = self._slot(buffer)
        address = start + base
        if address % _ALIGNMENT:
            self._run_twin(buffer, base)
            return
        if not self._num_tiles:
            return
        stream = torch.cuda.current_stream(self._index)
        self._memory.record_stream(stream)  # the table may be dropped before this has run
        arguments = (*self._addresses, self._num_tiles, address, int(self._into_slot))
        launch(self._index, stream, self._kernel, config, *arguments)

    def forget(self, buffer: Buffer) -> None:
        self._slots = {key: kept for key, kept in self._slots.items() if kept[0] is not buffer}
        if self._twin is not None:
            self._twin.forget(buffer)

    def _slot(self, buffer: Buffer) -> tuple[int, Any]:
        """The address of a buffer's first byte, and how a copy to or from it is launched."""
        if id(buffer) not in self._slots:  # the kept buffer makes its identity a safe key
            memory = buffer.tensor
            if not isinstance(memory, torch.Tensor) or not (memory.is_cuda or memory.is_pinned()):
                raise InternalError("a slot is neither in GPU memory nor in pinned host memory")
            num_blocks = -(-self._num_tiles // _WARPS_PER_BLOCK)
            if not memory.is_cuda:
                num_blocks = min(num_blocks, _MAX_HOST_BLOCKS)
            config = import_core().LaunchConfig(grid=max(num_blocks, 1), block=32 * _WARPS_PER_BLOCK)
            self._slots[id(buffer)] = buffer, memory.data_ptr(), config
        return self._slots[id(buffer)][1:]

    def _run_twin(self, buffer: Buffer, base: int) -> None:
        """No slot of a ring begins in the middle of 16 bytes; a caller's own may."""
        if self._twin is None:
            self._twin = TorchTable(self._rows, into_slot=self._into_slot)
        self._twin.run(buffer, base)
