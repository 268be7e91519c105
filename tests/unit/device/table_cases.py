"""What every table of strided copies is tested with: any rows, in either direction."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
import torch
from hypothesis import strategies as st

from wbridge.device.base import Buffer
from wbridge.device.cpu import CpuBuffer
from wbridge.device.tables import Row, Table

MAX_ELEMENTS = 200_000
"""Of a row. More than one host thread's part of a copy, for elements of any size but one byte."""
MOVES = [(torch.uint8,) * 2, (torch.bool,) * 2, (torch.bfloat16,) * 2, (torch.float32,) * 2,
         (torch.complex64,) * 2, (torch.complex128,) * 2]  # fmt: skip
NATIVE_CASTS = [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
HALF_CASTS = [(torch.float32, torch.float16), (torch.float16, torch.float32),
              (torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)]  # fmt: skip

Case = tuple[bool, list[Row], int]
"""A direction, rows with the place where each slot part starts, and the size of the slot."""


def random_bits(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits but those of a NaN, which casts of torch itself turn into one or another, and of a bool that
    is neither 0 nor 1, which torch makes one of them on a GPU."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 2**63 - 1, (-(-numel * dtype.itemsize // 8),), generator=generator)
    mask = 1 if dtype is torch.bool else 0xBF
    return (bits.view(torch.uint8)[: numel * dtype.itemsize] & mask).view(dtype)


@st.composite
def strides(draw: st.DrawFn, extents: list[int], *, may_repeat: bool) -> tuple[tuple[int, ...], int]:
    """Strides in any order of loops, with gaps; the number of elements that they span."""
    found, step = [0] * len(extents), 1
    for loop in draw(st.permutations(range(len(extents)))):
        if may_repeat and draw(st.integers(0, 5)) == 0:
            continue
        step *= draw(st.sampled_from([1, 1, 1, 2]))
        found[loop] = step
        step *= max(extents[loop], 1)
    return tuple(found), step


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    casts: Sequence[tuple[torch.dtype, torch.dtype]] = NATIVE_CASTS,
    max_elements: int = MAX_ELEMENTS,
) -> Case:
    """Rows of equal dtypes, and of the `casts`."""
    into_slot, rows, nbytes = draw(st.booleans()), [], 0
    for seed in range(draw(st.integers(1, 3))):
        dtype, slot_dtype = draw(st.sampled_from([*MOVES, *casts]))
        extents: list[int] = []
        for extent in draw(
            st.lists(st.sampled_from([0, 1, 2, 3, 8, 9, 63, 64, 65, 200, 700, 4096]), max_size=4)
        ):
            if math.prod(extents) * extent <= max_elements:
                extents.append(extent)
        inside, num_inside = draw(strides(extents, may_repeat=into_slot))
        outside, num_outside = draw(strides(extents, may_repeat=not into_slot))
        offset = draw(st.integers(0, 3))
        tensor = random_bits(offset + num_inside, dtype, seed)
        nbytes = -(-nbytes // 16) * 16
        rows.append(Row(tensor, tuple(extents), offset, inside, slot_dtype, nbytes, outside))
        nbytes += num_outside * slot_dtype.itemsize
    return into_slot, rows, nbytes


ELEMENTS = [(torch.uint8, 1), (torch.bfloat16, 1), (torch.float32, 1), (torch.bfloat16, 2),
            (torch.float64, 1), (torch.bfloat16, 4), (torch.complex128, 1), (torch.float32, 4),
            (torch.bfloat16, 3)]  # fmt: skip
"""Types, and how many of them go together when rows become columns."""


@st.composite
def transposes(draw: st.DrawFn, dtype: torch.dtype, run: int) -> Case:
    """One row, some matrices, that either side holds in another order of its loops, with gaps."""
    side = st.sampled_from([7, 16, 17, 31, 32, 33, 63, 64, 65, 130])
    extents = (draw(st.integers(1, 3)), draw(side), draw(side), run)
    places = []
    for order in draw(st.permutations([(0, 1, 2, 3), (0, 2, 1, 3)])):
        found, step = [0] * 4, 1
        for loop in reversed(order):
            found[loop] = step
            step = step * extents[loop] + (draw(st.sampled_from([0, 0, run, 1])) if loop != 3 else 0)
        places.append((tuple(found), step))
    (inside, num_inside), (outside, num_outside) = places
    offset = run * draw(st.integers(0, 2)) + draw(st.sampled_from([0, 0, 0, 1]))
    row = Row(random_bits(offset + num_inside, dtype, 1), extents, offset, inside, dtype, 0, outside)
    return draw(st.booleans()), [row], num_outside * dtype.itemsize


def cpu_buffer(nbytes: int) -> Buffer:
    return CpuBuffer(nbytes, "pinned")


def outcome(
    table: type[Table],
    case: Case,
    *,
    place: str = "cpu",
    allocate: Callable[[int], Buffer] = cpu_buffer,
    base: int = 16,
) -> list[torch.Tensor]:
    """All bytes that there are after the copy: of the slot, `allocate`d with room around it, and of the
    tensors, which are on the device `place`."""
    into_slot, rows, nbytes = case
    rows = [msgspec.structs.replace(row, tensor=row.tensor.to(place, copy=True)) for row in rows]
    buffer = allocate(nbytes + 32)
    memory = buffer.tensor
    assert isinstance(memory, torch.Tensor)
    memory.copy_(random_bits(nbytes + 32, torch.uint8, 99))
    table(rows, into_slot=into_slot).run(buffer, base)
    if place != "cpu":
        torch.cuda.synchronize()
    return [memory.cpu(), *(row.tensor.cpu() for row in rows)]


def assert_equal_bits(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> None:
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def every_value(source: torch.dtype) -> torch.Tensor:
    """All values of 16 bits; of float32, all upper halves with the lower bits around each tie of a cast."""
    if source is not torch.float32:
        return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(source)
    upper = torch.arange(65536, dtype=torch.int32) << 16
    to_bfloat16 = (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
    to_float16 = (0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001, 0xEFFF, 0xF000)
    return torch.cat([upper | low for low in (*to_bfloat16, *to_float16)]).view(torch.float32)


def assert_rounds_like_torch(
    table: type[Table],
    pair: tuple[torch.dtype, torch.dtype],
    *,
    place: str = "cpu",
    allocate: Callable[[int], Buffer] = cpu_buffer,
) -> None:
    """Casts every value, once as a gather and once as a scatter."""
    source, target = pair
    values = every_value(source)
    expected = values.to(target)
    whole = (tuple(values.shape), 0, (1,))
    case = True, [Row(values, *whole, target, 0, (1,))], expected.nbytes
    after = outcome(table, case, place=place, allocate=allocate, base=0)
    gathered = after[0][: expected.nbytes].view(target)
    buffer = allocate(values.nbytes)
    assert isinstance(buffer.tensor, torch.Tensor)
    buffer.tensor.copy_(values.view(torch.uint8))
    scattered = torch.zeros_like(expected, device=place)
    table([Row(scattered, *whole, source, 0, (1,))], into_slot=False).run(buffer, 0)
    if place != "cpu":
        torch.cuda.synchronize()
    for got in (gathered, scattered.cpu()):
        is_number = ~expected.isnan()
        assert torch.equal(got.isnan(), expected.isnan())
        assert torch.equal(got[is_number].view(torch.int8), expected[is_number].view(torch.int8))
