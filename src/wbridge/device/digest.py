"""Digests of live tensors on checkpoint coordinates: sums that are equal for any two layouts of one data."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Final, TypeAlias

import msgspec
import torch

from wbridge.device.copy import Tensors, last_element
from wbridge.device.cuda_driver import relaxed
from wbridge.device.kernels.digests import Digested, DigestTable, can_digest
from wbridge.device.kernels.program import why_missing
from wbridge.errors import LayoutError
from wbridge.layout.region import Strided

BLOCK_ELEMENTS: Final = 2**18
"""Elements that are digested at a time: some 16 MB of temporary memory, whatever the tensor's size."""

_GOLDEN: Final = 0x9E3779B97F4A7C15
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Part(msgspec.Struct, frozen=True):
    """Elements of a live tensor and of the checkpoint tensor that they hold, loop by loop.

    `elements` counts from the parameter's `data_ptr`. `dtype` is the wire's: digests are over its bits.
    The sums of parts with equal `key` are added up.
    """

    key: str
    tensor: str
    parameter: str
    extents: tuple[int, ...]
    elements: Strided
    checkpoint: Strided
    dtype: str


Key: TypeAlias = tuple[str, str]
"""Of a sum: the part's key, and the checkpoint tensor."""


class Digester:
    """Sums up one 64-bit value per element, a mix of tensor name, index in the checkpoint and bits.

    Sums are mod 2^64, so neither the order nor the division into parts matters; one element with other
    bits always changes the sum. All NaNs of a float type count as the same, since casts do not keep them
    apart.

    On a GPU one kernel digests all parts whose dtypes it knows; torch does the rest, element by element in
    some forty passes.
    """

    def __init__(self, parts: Iterable[Part], tensors: Tensors) -> None:
        by_device: dict[torch.device, list[Part]] = {}
        for part in parts:
            by_device.setdefault(tensors[part.parameter].device, []).append(part)
        self._sums = [_Sums(device, parts, tensors) for device, parts in by_device.items()]

    def run(self) -> None:
        """Read every part now, in the calling thread; to be submitted to a stream."""
        with torch.inference_mode():
            for sums in self._sums:
                sums.run()

    def sums(self) -> dict[str, dict[str, int]]:
        """Return the sum for each key and checkpoint tensor, once the stream has run it."""
        found: dict[str, dict[str, int]] = {}
        for sums in self._sums:
            for (key, tensor), total in sums.found().items():
                of_key = found.setdefault(key, {})
                of_key[tensor] = (of_key.get(tensor, 0) + total) % 2**64
        return found


class _Sums:
    """The sums of one device's parts, in the host's memory when the device has come that far."""

    def __init__(self, device: torch.device, parts: Sequence[Part], tensors: Tensors) -> None:
        self._tensors = tensors
        self._places: dict[Key, int] = {}
        for part in parts:
            self._places.setdefault((part.key, part.tensor), len(self._places))
        self._device = device
        is_cuda = device.type == "cuda"
        with relaxed() if is_cuda else nullcontext():
            self._host = torch.zeros(len(self._places), dtype=torch.int64, pin_memory=is_cuda)
        has_kernel = is_cuda and why_missing(device.index) is None
        by_kernel = [part for part in parts if has_kernel and _is_for_kernel(part, tensors)]
        self._by_torch = [part for part in parts if not (has_kernel and _is_for_kernel(part, tensors))]
        self._table: DigestTable | None = None
        if by_kernel:
            described = [digested(part, tensors, self._places) for part in by_kernel]
            self._table = DigestTable(described, device.index)

    def run(self) -> None:
        sums = torch.zeros(len(self._places), dtype=torch.int64, device=self._device)
        for part in self._by_torch:
            sums[self._places[part.key, part.tensor]] += _sum_of(part, self._tensors[part.parameter])
        if self._table is not None:
            self._table.add_to(sums)
        self._host.copy_(sums, non_blocking=True)

    def found(self) -> dict[Key, int]:
        totals = self._host.tolist()
        return {key: totals[place] for key, place in self._places.items()}


def digested(part: Part, tensors: Tensors, places: Mapping[Key, int]) -> Digested:
    """Return the part as the kernel is told of it; it keeps no tensor.

    Raises:
        LayoutError: the tensor is smaller than it was, as after its storage was resized.
    """
    tensor = tensors[part.parameter]
    size = tensor.itemsize
    last = part.elements.offset + last_element(part.extents, part.elements.strides)
    if (int(tensor.storage_offset()) + last + 1) * size > tensor.untyped_storage().nbytes():
        raise LayoutError(f"{part.parameter}: its memory was taken away; bring it back, and verify again")
    return Digested(
        address=tensor.data_ptr() + part.elements.offset * size,
        first=part.checkpoint.offset,
        seed=_seed(part.tensor),
        dtype=tensor.dtype,
        wire=getattr(torch, part.dtype),
        extents=part.extents,
        steps=tuple(stride * size for stride in part.elements.strides),
        checkpoint_steps=part.checkpoint.strides,
        sum=places[part.key, part.tensor],
    )


def _is_for_kernel(part: Part, tensors: Tensors) -> bool:
    return can_digest(tensors[part.parameter].dtype, getattr(torch, part.dtype))


def _seed(tensor: str) -> int:
    return int.from_bytes(hashlib.blake2b(tensor.encode(), digest_size=8).digest(), "little")


def _sum_of(part: Part, tensor: torch.Tensor) -> torch.Tensor:
    seed = _seed(part.tensor)
    dtype = getattr(torch, part.dtype)
    if dtype.itemsize not in _BITS:
        raise LayoutError(f"{part.parameter}: elements of {dtype.itemsize} bytes cannot be digested")
    whole = tensor.detach()
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for extents, start in _iter_blocks(part.extents):
        values = whole.as_strided(
            extents,
            part.elements.strides,
            whole.storage_offset() + _at(part.elements, start),
        )
        index = _index(extents, Strided(_at(part.checkpoint, start), part.checkpoint.strides), tensor.device)
        key = _mix_(index.add_(1).mul_(_signed(_GOLDEN)).add_(_signed(seed)))
        total += _mix_(key.add_(_bits(values, dtype).mul_(_signed(0xD1342543DE82EF95)))).sum()
    return total


def _bits(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The wire bits of `values` as integers, in a new tensor."""
    wire = values.to(dtype).contiguous()
    bits = wire.view(_BITS[dtype.itemsize]).to(torch.int64, copy=True)
    if dtype.is_floating_point:
        bits.masked_fill_((wire.float() if dtype.itemsize == 1 else wire).isnan(), -1)
    return bits


def _index(extents: Sequence[int], place: Strided, device: torch.device) -> torch.Tensor:
    """The flat checkpoint index of each element of a block."""
    index = torch.full(tuple(extents), place.offset, dtype=torch.int64, device=device)
    for dim, (extent, stride) in enumerate(zip(extents, place.strides, strict=True)):
        shape = [1] * len(extents)
        shape[dim] = extent
        index += (torch.arange(extent, dtype=torch.int64, device=device) * stride).reshape(shape)
    return index


def _mix_(z: torch.Tensor) -> torch.Tensor:
    """Spread every bit over all 64, in place and reversibly (a xor-shift-multiply finaliser)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z.bitwise_xor_(_shifted(z, shift)).mul_(_signed(factor))
    return z.bitwise_xor_(_shifted(z, 31))


def _shifted(z: torch.Tensor, by: int) -> torch.Tensor:
    """Shift right as if unsigned."""
    return (z >> by).bitwise_and_((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def _at(place: Strided, start: Sequence[int]) -> int:
    return place.offset + sum(i * stride for i, stride in zip(start, place.strides, strict=True))


def _iter_blocks(extents: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (extents, start) of blocks of at most `BLOCK_ELEMENTS`, that together are all elements."""
    sizes = list(extents)
    while math.prod(sizes) > BLOCK_ELEMENTS:
        longest = max(range(len(sizes)), key=sizes.__getitem__)
        rest = math.prod(sizes) // sizes[longest]
        sizes[longest] = max(1, min(BLOCK_ELEMENTS // rest, sizes[longest] // 2))
    starts = [range(0, extent, size) for extent, size in zip(extents, sizes, strict=True)]
    for start in itertools.product(*starts):
        yield tuple(min(s, n - i) for s, n, i in zip(sizes, extents, start, strict=True)), start
