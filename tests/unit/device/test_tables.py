"""The native table, the kernel of GPUs on a CPU, and their torch twin copy the same bytes, for any rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.device.grid import COMPILER, GridTable
from tests.unit.device.table_cases import (
    ELEMENTS,
    HALF_CASTS,
    NATIVE_CASTS,
    Case,
    assert_equal_bits,
    assert_rounds_like_torch,
    cases,
    outcome,
    random_bits,
    transposes,
)
from wbridge.device.cpu import CpuBuffer
from wbridge.device.tables import NativeTable, Row, Table, TorchTable
from wbridge.errors import LayoutError
from wbridge.native.extension import why_missing

needs_extension = pytest.mark.skipif(why_missing() is not None, reason=str(why_missing()))
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="g++ compiles the kernel for the CPU")
NATIVE = pytest.param(NativeTable, marks=needs_extension, id="native")
GRID = pytest.param(GridTable, marks=needs_compiler, id="grid")
TORCH = pytest.param(TorchTable, id="torch")


@needs_extension
@given(case=cases())
def test_native_equals_its_twin(case: Case) -> None:
    assert_equal_bits(outcome(NativeTable, case), outcome(TorchTable, case))


@needs_compiler
@given(case=cases(casts=[*NATIVE_CASTS, *HALF_CASTS], max_elements=20_000))
def test_the_kernel_equals_its_twin(case: Case) -> None:
    assert_equal_bits(outcome(GridTable, case), outcome(TorchTable, case))


@pytest.mark.parametrize("table", [NATIVE, GRID])
@pytest.mark.parametrize("element", ELEMENTS, ids=str)
@settings(max_examples=15)
@given(data=st.data())
def test_transposes_equal_their_twin(
    table: type[Table], element: tuple[torch.dtype, int], data: st.DataObject
) -> None:
    case = data.draw(transposes(*element))
    assert_equal_bits(outcome(table, case), outcome(TorchTable, case))


@pytest.mark.parametrize("table", [NATIVE, TORCH, GRID])
@pytest.mark.parametrize("pair", NATIVE_CASTS, ids=str)
def test_casts_round_like_torch_on_every_value(
    table: type[Table], pair: tuple[torch.dtype, torch.dtype]
) -> None:
    assert_rounds_like_torch(table, pair)


@needs_compiler
@pytest.mark.parametrize("pair", HALF_CASTS, ids=str)
def test_casts_of_float16_round_like_torch_on_every_value(pair: tuple[torch.dtype, torch.dtype]) -> None:
    assert_rounds_like_torch(GridTable, pair)


@pytest.mark.parametrize("table", [NATIVE, GRID])
@pytest.mark.parametrize("into_slot", [True, False])
def test_large_rows_at_odd_places_equal_their_twin(table: type[Table], into_slot: bool) -> None:
    """Written around the caches, which takes whole lines: these rows start and end inside one."""
    rows = [
        Row(random_bits(5 + 1000 * 5000, torch.bfloat16, 1), (1000, 4501), 5, (5000, 1), torch.bfloat16, 6,
            (4501, 1)),
        Row(random_bits(1027 * 129, torch.float32, 2), (1027, 129), 0, (1, 1027), torch.float32, 9_002_016,
            (129, 1)),
    ]  # fmt: skip
    case = into_slot, rows, 9_002_016 + 1027 * 129 * 4
    assert_equal_bits(outcome(table, case), outcome(TorchTable, case))


@needs_extension
def test_a_storage_that_moved_is_noticed_before_its_old_memory_is_used() -> None:
    tensor = torch.ones(8)
    table = NativeTable([Row(tensor, (8,), 0, (1,), torch.float32, 0, (1,))], into_slot=True)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(LayoutError, match="resized since the worker connected"):
        table.run(CpuBuffer(32, "pinned"), 0)
