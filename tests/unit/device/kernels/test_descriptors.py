"""What the kernel is told to do: which items, how wide, and how many tiles."""

from __future__ import annotations

import struct
from collections import Counter

import pytest
import torch
from hypothesis import given

from tests.unit.device.grid import COMPILER, GridTable
from tests.unit.device.table_cases import Case, assert_equal_bits, cases, outcome, transposes
from wbridge.device.kernels import descriptors
from wbridge.device.kernels.descriptors import Descriptors, build_descriptors
from wbridge.device.tables import Row, TorchTable


def row(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    slot_strides: tuple[int, ...],
    *,
    dtype: torch.dtype = torch.bfloat16,
    slot_dtype: torch.dtype | None = None,
    offset: int = 0,
    slot_offset: int = 0,
) -> Row:
    span = offset + 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    return Row(
        torch.zeros(span, dtype=dtype), shape, offset, strides, slot_dtype or dtype, slot_offset, slot_strides
    )


def described(rows: list[Row]) -> Descriptors:
    return build_descriptors(rows, into_slot=True)


def kinds(*rows: Row) -> list[int]:
    table = described(list(rows))
    copies = bytes(table.memory[: table.loops_offset].tolist())
    return [fields[7] for fields in struct.iter_unpack("<QqIIIIIIxxxxxxxx", copies)]


def tiles(table: Descriptors) -> Counter[int]:
    return Counter(table.memory[table.tiles_offset :].view(torch.int32).tolist())


@pytest.mark.parametrize(
    ("copied", "expected"),
    [
        (row((100, 64), (128, 1), (64, 1)), [4]),  # 16 bytes everywhere
        (row((100, 60), (128, 1), (60, 1)), [3]),  # rows of 120 bytes
        (row((100, 64), (130, 1), (64, 1)), [2]),  # rows that begin at 4 bytes
        (row((100, 64), (128, 1), (64, 1), offset=1), [1]),
        (row((64,), (1,), (1,), offset=1, slot_offset=2), [1, 4, 1]),  # what precedes and follows 16 bytes
        (row((64,), (1,), (1,), offset=1), [1]),
        (row((8, 8, 8), (64, 8, 1), (64, 8, 1)), [4]),  # one run of 1024 bytes
        (row((64, 64), (1, 64), (64, 1)), [6]),
        (row((64, 64, 2), (2, 128, 1), (128, 2, 1)), [7]),  # elements of 4 bytes
        (row((64, 8), (1, 64), (8, 1)), [1]),  # too narrow for a square
        (row((64, 64), (64, 1), (64, 1), slot_dtype=torch.float32), [13]),
        (row((64, 63), (64, 1), (63, 1), slot_dtype=torch.float32), [12]),
    ],
)
def test_items_are_as_wide_as_everything_is_aligned(copied: Row, expected: list[int]) -> None:
    assert kinds(copied) == expected


def test_one_huge_row_and_many_tiny_ones_make_tiles_of_about_equal_bytes() -> None:
    huge, num_tiny = 2**26, 20_000
    tiny = [row((8, 16), (16, 1), (16, 1)) for _ in range(num_tiny)]
    whole = Row(torch.empty(1), (huge,), 0, (1,), torch.float32, 0, (1,))
    table = described([whole, *tiny])
    counts = tiles(table)
    assert counts.pop(0) == huge * 4 // (4 * 1024)
    assert set(counts.values()) == {1}
    assert table.num_tiles == huge * 4 // (4 * 1024) + num_tiny


def test_empty_rows_are_no_work() -> None:
    assert described([row((3, 0), (1, 1), (1, 1))]).num_tiles == 0


@pytest.mark.skipif(COMPILER is None, reason="g++ compiles the kernel for the CPU")
@given(case=cases(max_elements=20_000) | transposes(torch.float32, 1))
def test_copies_of_too_many_items_are_split(case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(descriptors, "_MAX_ITEMS", 100)
        got = outcome(GridTable, case)
    assert_equal_bits(got, outcome(TorchTable, case))
