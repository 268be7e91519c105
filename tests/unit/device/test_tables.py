"""The native table and its torch twin copy the same bytes, for any rows."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wbridge.device.cpu import CpuBuffer
from wbridge.device.tables import NativeTable, Row, Table, TorchTable
from wbridge.errors import LayoutError
from wbridge.native.extension import why_missing

pytestmark = pytest.mark.skipif(why_missing() is not None, reason=str(why_missing()))
TABLES = (NativeTable, TorchTable)
MAX_ELEMENTS = 200_000
"""More than one thread's part of a copy, for elements of any size but one byte."""


def random_bits(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits but those of a NaN, which casts of torch itself turn into one or another."""
    bits = torch.randint(0, 256, (numel * dtype.itemsize,), generator=torch.Generator().manual_seed(seed))
    return (bits & 0xBF).to(torch.uint8).view(dtype)


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
def cases(draw: st.DrawFn) -> tuple[bool, list[tuple[Row, int]], int]:
    """A direction, rows with the place where each slot part starts, and the size of the slot."""
    into_slot, rows, nbytes = draw(st.booleans()), [], 0
    for seed in range(draw(st.integers(1, 3))):
        dtype, slot_dtype = draw(
            st.sampled_from(
                [(torch.uint8,) * 2, (torch.bool,) * 2, (torch.bfloat16,) * 2, (torch.float32,) * 2,
                 (torch.complex64,) * 2, (torch.complex128,) * 2,
                 (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
            )
        )  # fmt: skip
        extents: list[int] = []
        for extent in draw(
            st.lists(st.sampled_from([0, 1, 2, 3, 8, 9, 63, 64, 65, 200, 700, 4096]), max_size=4)
        ):
            if math.prod(extents) * extent <= MAX_ELEMENTS:
                extents.append(extent)
        inside, num_inside = draw(strides(extents, may_repeat=into_slot))
        outside, num_outside = draw(strides(extents, may_repeat=not into_slot))
        offset = draw(st.integers(0, 3))
        tensor = random_bits(offset + num_inside, dtype, seed)
        nbytes = -(-nbytes // 16) * 16
        rows.append(Row(tensor, tuple(extents), offset, inside, slot_dtype, nbytes, outside))
        nbytes += num_outside * slot_dtype.itemsize
    return into_slot, rows, nbytes


def outcome(table: type[Table], into_slot: bool, rows: list[Row], nbytes: int) -> list[torch.Tensor]:
    """All bytes that there are after the copy: of the slot and of the tensors."""
    rows = [
        Row(row.tensor.clone(), row.extents, row.offset, row.strides, row.slot_dtype, row.slot_offset,
            row.slot_strides)
        for row in rows
    ]  # fmt: skip
    buffer = CpuBuffer(nbytes + 32, "pinned")
    buffer.tensor.copy_(random_bits(nbytes + 32, torch.uint8, 99))
    table(rows, into_slot=into_slot).run(buffer, 16)
    return [buffer.tensor, *(row.tensor for row in rows)]


@given(case=cases())
def test_native_equals_its_twin(case: tuple[bool, list[Row], int]) -> None:
    native, twin = (outcome(table, *case) for table in TABLES)
    for left, right in zip(native, twin, strict=True):
        assert torch.equal(left.view(torch.uint8), right.view(torch.uint8))


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("pair", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_casts_round_like_torch_on_every_value(table: type[Table], pair: tuple[torch.dtype, ...]) -> None:
    """All 65536 upper halves, with lower halves below, at and above the tie."""
    upper = torch.arange(65536, dtype=torch.int32) << 16
    if pair[0] is torch.float32:
        source = torch.cat([upper | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]).view(
            torch.float32
        )
    else:
        source = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    buffer = CpuBuffer(source.numel() * pair[1].itemsize, "pinned")
    table([Row(source, tuple(source.shape), 0, (1,), pair[1], 0, (1,))], into_slot=True).run(buffer, 0)
    got, expected = buffer.tensor.view(pair[1]), source.to(pair[1])
    finite = ~expected.isnan()
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got[finite].view(torch.uint8), expected[finite].view(torch.uint8))


@pytest.mark.parametrize("into_slot", [True, False])
def test_native_equals_its_twin_past_the_caches(into_slot: bool) -> None:
    """Written around the caches, which takes whole lines: these rows start and end inside one."""
    rows = [
        Row(random_bits(5 + 1000 * 5000, torch.bfloat16, 1), (1000, 4501), 5, (5000, 1), torch.bfloat16, 6,
            (4501, 1)),
        Row(random_bits(1027 * 129, torch.float32, 2), (1027, 129), 0, (1, 1027), torch.float32, 9_002_016,
            (129, 1)),
    ]  # fmt: skip
    native, twin = (outcome(table, into_slot, rows, 9_002_016 + 1027 * 129 * 4) for table in TABLES)
    for left, right in zip(native, twin, strict=True):
        assert torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def test_a_storage_that_moved_is_noticed_before_its_old_memory_is_used() -> None:
    tensor = torch.ones(8)
    table = NativeTable([Row(tensor, (8,), 0, (1,), torch.float32, 0, (1,))], into_slot=True)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(LayoutError, match="resized since the worker connected"):
        table.run(CpuBuffer(32, "pinned"), 0)
