"""The digest kernel: what it is told of the parts of a digest, and its launch."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch

from wbridge.device.cuda_stream import upload
from wbridge.device.kernels.descriptors import Descriptors, Loop, join, merge, pack_loop
from wbridge.device.kernels.program import import_core, launch, load_kernel

KERNEL: Final = "digest_table"

_PART: Final = struct.Struct("<QqQQQIIIIIIIIQ")
_MAX_ELEMENTS: Final = 2**31 - 2**17
"""Of one part, as of one copy."""
_TILE_ELEMENTS: Final = 4096
_WARPS_PER_BLOCK: Final = 8

_PLAIN: Final = {1: 0, 2: 1, 4: 2, 8: 3}
"""The kinds that `digest.cu` numbers: by the size of the elements, if they travel as they are."""
_NARROWED: Final = {
    (torch.float32, torch.bfloat16): 4,
    (torch.float32, torch.float16): 5,
    (torch.bfloat16, torch.float16): 6,
    (torch.float16, torch.bfloat16): 7,
}
_NANS: Final = {
    torch.float64: (0x7FFF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000),
    torch.float32: (0x7FFF_FFFF, 0x7F80_0000),
    torch.bfloat16: (0x7FFF, 0x7F80),
    torch.float16: (0x7FFF, 0x7C00),
    torch.float8_e5m2: (0x7F, 0x7C),
    torch.float8_e4m3fn: (0x7F, 0x7E),
}
"""A mask, and the largest number under it that is none."""


class Digested(NamedTuple):
    """Elements of one tensor, loop by loop; steps in memory are bytes. `sum` says where they are added."""

    address: int
    first: int
    seed: int
    dtype: torch.dtype
    wire: torch.dtype
    extents: tuple[int, ...]
    steps: tuple[int, ...]
    checkpoint_steps: tuple[int, ...]
    sum: int


def can_digest(dtype: torch.dtype, wire: torch.dtype) -> bool:
    """Whether the kernel knows the dtypes, of the elements and of what travels of them."""
    if wire.is_floating_point and wire not in _NANS:
        return False
    return (dtype, wire) in _NARROWED or (dtype == wire and dtype.itemsize in _PLAIN)


def describe(parts: Sequence[Digested]) -> Descriptors:
    """Describe parts that the kernel can digest."""
    packed, loops, num_loops = bytearray(), bytearray(), 0
    tiles_of: list[int] = []
    num_tiles = 0
    for part in itertools.chain.from_iterable(map(_iter_pieces, parts)):
        merged = merge(map(Loop, part.extents, part.steps, part.checkpoint_steps)) or [Loop(1, 0, 0)]
        count = _count(part.extents)
        kind = _NARROWED.get((part.dtype, part.wire), _PLAIN.get(part.dtype.itemsize, 0))
        packed += _PART.pack(
            part.address, part.first, part.seed, *_NANS.get(part.wire, (0, 0)),
            num_tiles, _TILE_ELEMENTS, count, num_loops, len(merged), kind, part.sum, 0, 0,
        )  # fmt: skip
        loops += b"".join(map(pack_loop, merged))
        num_loops += len(merged)
        tiles_of.append(-(-count // _TILE_ELEMENTS))
        num_tiles += tiles_of[-1]
    return join(packed, loops, tiles_of)


def _iter_pieces(part: Digested) -> Iterator[Digested]:
    """The part, or halves of it that are not too large to number their elements."""
    if _count(part.extents) <= _MAX_ELEMENTS:
        yield part
        return
    longest = max(range(len(part.extents)), key=part.extents.__getitem__)
    half = part.extents[longest] // 2
    for start, extent in ((0, half), (half, part.extents[longest] - half)):
        piece = part._replace(
            address=part.address + start * part.steps[longest],
            first=part.first + start * part.checkpoint_steps[longest],
            extents=(*part.extents[:longest], extent, *part.extents[longest + 1 :]),
        )
        yield from _iter_pieces(piece)


def _count(extents: Sequence[int]) -> int:
    count = 1
    for extent in extents:
        count *= extent
    return count


class DigestTable:
    """Parts on one GPU, digested by one launch on torch's current stream of that GPU.

    Raises:
        NativeUnavailable: the kernel cannot be had on this GPU.
    """

    def __init__(self, parts: Sequence[Digested], index: int) -> None:
        self._index = index
        self._kernel: Any = load_kernel(index, KERNEL)  # each version of cuda.core has its own Kernel
        table = describe(parts)
        self._num_tiles = table.num_tiles
        self._memory = upload(table.memory, index)
        start = self._memory.data_ptr()
        self._addresses = (start, start + table.loops_offset, start + table.tiles_offset)
        num_blocks = max(-(-table.num_tiles // _WARPS_PER_BLOCK), 1)
        self._config = import_core().LaunchConfig(grid=num_blocks, block=32 * _WARPS_PER_BLOCK)

    def add_to(self, sums: torch.Tensor) -> None:
        """Add what is found to `sums`, int64 on this GPU. Neither waits nor allocates."""
        if self._num_tiles:
            stream = torch.cuda.current_stream(self._index)
            self._memory.record_stream(stream)  # the table may be dropped before this has run
            arguments = (*self._addresses, self._num_tiles, sums.data_ptr())
            launch(self._index, stream, self._kernel, self._config, *arguments)
