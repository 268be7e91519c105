"""The strided kernel on a GPU: memory spaces, streams, threads and alignment, which no CPU checks."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.property.layout_strategies import SIZES, regions
from tests.property.test_digest import WIRES, any_bits, held
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
from wbridge.cache import Cache
from wbridge.device.base import Buffer, MemoryKind
from wbridge.device.copy import Block, build_gather, build_scatter
from wbridge.device.cuda import CudaDevice
from wbridge.device.digest import Digester, Part
from wbridge.device.kernels import digests
from wbridge.device.kernels.program import load_cubin, load_kernel, why_missing
from wbridge.device.kernels.table import KernelTable
from wbridge.device.tables import Row, Table, TorchTable
from wbridge.errors import LayoutError
from wbridge.layout.region import Strided

pytestmark = pytest.mark.gpu
GPU = "cuda:0"
TABLES = [KernelTable, TorchTable]
KINDS: list[MemoryKind] = ["device", "pinned"]


def allocate(kind: MemoryKind) -> Callable[[int], Buffer]:
    return lambda nbytes: CudaDevice(0).allocate(nbytes, kind)


def agrees_with_the_cpu(table: type[Table], case: Case, kind: MemoryKind, base: int = 16) -> None:
    got = outcome(table, case, place=GPU, allocate=allocate(kind), base=base)
    assert_equal_bits(got, outcome(TorchTable, case, base=base))


def test_what_the_kernel_moves_stays_in_registers() -> None:
    """In a thread's own memory, which the compiler takes for values that are set under a condition, each byte
    crosses the caches twice more: 0.6 of a plain copy instead of 0.9."""
    assert load_kernel(0).attributes.local_size_bytes <= 16
    assert load_kernel(0, digests.KERNEL).attributes.local_size_bytes == 0


@settings(max_examples=40)
@given(drawn=st.data(), wire=st.sampled_from(WIRES))
def test_parts_are_digested_as_on_a_cpu(drawn: st.DataObject, wire: tuple[str, str]) -> None:
    num_elements = drawn.draw(SIZES)
    region = drawn.draw(regions(num_elements, ("slice", "split", "permute", "merge", "select", "flip")))
    here = held(region, any_bits(num_elements, 5, getattr(torch, wire[0])))
    part = Part("a", "w", "p", region.extents, region.target, region.source, wire[1])
    parts = [part, part, msgspec.structs.replace(part, key="b", tensor="v")]
    assert digest_of(parts, here.cuda()) == digest_of(parts, here)


def digest_of(parts: list[Part], tensor: torch.Tensor) -> dict[str, dict[str, int]]:
    digester = Digester(parts, {"p": tensor})
    digester.run()
    torch.cuda.synchronize()
    return digester.sums()


def test_a_digest_neither_waits_nor_looks_at_what_was_not_asked_for() -> None:
    device = CudaDevice(0)
    values = torch.zeros(2**22, device=GPU)
    part = Part("", "w", "p", (2**22,), Strided(0, (1,)), Strided(0, (1,)), "float32")
    digester = Digester([part], {"p": values})
    stream = device.open_stream("digest")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        stream.submit(lambda: torch.cuda._sleep(200_000_000))
        stream.submit(lambda: values.fill_(3.0))
        stream.submit(digester.run)
        event = stream.record()
        was_done = event.is_done()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not was_done, "the digest was waited for"
    event.synchronize()
    assert digester.sums() == digest_of([part], torch.full((2**22,), 3.0))


def test_the_kernel_is_used_on_this_gpu() -> None:
    assert why_missing(0) is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("table", TABLES)
@settings(max_examples=40)
@given(case=cases(casts=[*NATIVE_CASTS, *HALF_CASTS]))
def test_any_rows_are_copied_as_on_a_cpu(table: type[Table], kind: MemoryKind, case: Case) -> None:
    agrees_with_the_cpu(table, case, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("element", ELEMENTS, ids=str)
@settings(max_examples=15)
@given(data=st.data())
def test_transposes_are_copied_as_on_a_cpu(
    element: tuple[torch.dtype, int], kind: MemoryKind, data: st.DataObject
) -> None:
    agrees_with_the_cpu(KernelTable, data.draw(transposes(*element)), kind)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("pair", [*NATIVE_CASTS, *HALF_CASTS], ids=str)
def test_casts_round_as_on_a_cpu(table: type[Table], pair: tuple[torch.dtype, torch.dtype]) -> None:
    assert_rounds_like_torch(table, pair, place=GPU, allocate=allocate("device"))


@pytest.mark.parametrize("into_slot", [True, False])
@pytest.mark.parametrize(("offset", "slot_offset"), [(0, 0), (1, 1), (3, 3), (1, 2), (8, 4)])
@pytest.mark.parametrize("base", [16, 3])
def test_bytes_at_any_address_are_copied(offset: int, slot_offset: int, base: int, into_slot: bool) -> None:
    long = Row(random_bits(5000, torch.uint8, 1), (4901,), offset, (1,), torch.uint8, slot_offset, (1,))
    lines = Row(random_bits(70 * 70, torch.uint8, 2), (64, 63), offset, (70, 1), torch.uint8,
                6000 + slot_offset, (64, 1))  # fmt: skip
    agrees_with_the_cpu(KernelTable, (into_slot, [long, lines], 6000 + 64 * 64 + 16), "device", base=base)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("into_slot", [True, False])
def test_one_huge_row_and_twenty_thousand_small_ones_are_copied(into_slot: bool, kind: MemoryKind) -> None:
    values = torch.arange(2**24 + 20_000 * 20, dtype=torch.int32, device=GPU)
    rows, end = [Row(values, (2**24,), 0, (1,), torch.int32, 0, (1,))], 2**24
    for _ in range(20_000):
        rows.append(Row(values, (4, 4), end, (5, 1), torch.int32, 4 * end, (4, 1)))
        end += 20
    buffer = CudaDevice(0).allocate(4 * end, kind)
    memory = buffer.tensor
    assert isinstance(memory, torch.Tensor)
    if into_slot:
        KernelTable(rows, into_slot=True).run(buffer, 0)
    else:
        memory.view(torch.int32).copy_(torch.arange(end, dtype=torch.int32))
        values.zero_()
        KernelTable(rows, into_slot=False).run(buffer, 0)
    torch.cuda.synchronize()
    expected = torch.arange(end, dtype=torch.int32)
    packed, blocks = expected[2**24 :].view(-1, 20).clone(), expected[2**24 :].view(-1, 20)
    blocks.zero_()
    if into_slot:
        blocks[:, :16] = packed.view(-1, 4, 5)[:, :, :4].reshape(-1, 16)
        got = memory.view(torch.int32).cpu()
    else:
        blocks.view(-1, 4, 5)[:, :, :4] = packed[:, :16].view(-1, 4, 4)
        got = values.cpu()
    assert torch.equal(got, expected)


def test_one_element_of_the_slot_is_replicated_over_a_parameter() -> None:
    slot = CudaDevice(0).allocate(4 * 100, "device")
    assert isinstance(slot.tensor, torch.Tensor)
    slot.tensor.view(torch.float32).copy_(torch.arange(100.0))
    target = torch.zeros(50, 100, 3, device=GPU)
    row = Row(target, (50, 100, 3), 0, target.stride(), torch.float32, 0, (0, 1, 0))
    KernelTable([row], into_slot=False).run(slot, 0)
    assert torch.equal(target.cpu(), torch.arange(100.0).view(1, 100, 1).expand(50, 100, 3))


def test_what_the_kernel_cannot_cast_is_left_to_torch() -> None:
    tensors = {
        "moved": torch.arange(64, dtype=torch.bfloat16, device=GPU),
        "cast": torch.arange(64, dtype=torch.float32, device=GPU),
        "odd": torch.arange(64, dtype=torch.float64, device=GPU),
    }
    blocks = [Block(name, (64,), 0, (1,), "bfloat16", 128 * k, (1,)) for k, name in enumerate(tensors)]
    slot = CudaDevice(0).allocate(3 * 128, "device")
    assert isinstance(slot.tensor, torch.Tensor)
    build_gather(blocks, tensors).run(slot, 0)
    assert torch.equal(slot.tensor.view(torch.bfloat16).cpu(), torch.arange(64).repeat(3).to(torch.bfloat16))
    back = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    build_scatter(blocks, back).run(slot, 0)
    for name, tensor in tensors.items():
        assert torch.equal(back[name], tensor)


def test_a_run_neither_waits_nor_allocates_and_is_ordered_in_its_stream() -> None:
    """The table is built in one stream and run in another, in a thread that never used the GPU, while work
    that comes before it is still running."""
    device = CudaDevice(0)
    values = torch.zeros(2**20, device=GPU)
    slot = device.allocate(4 * 2**20, "device")
    table = KernelTable([Row(values, (2**20,), 0, (1,), torch.float32, 0, (1,))], into_slot=True)
    table.run(slot, 0)
    torch.cuda.synchronize()
    stream = device.open_stream("copies")
    failures: list[BaseException] = []

    def work() -> None:
        torch.cuda._sleep(200_000_000)
        values.fill_(3.0)
        table.run(slot, 0)

    def submit() -> None:
        try:
            stream.submit(work)
        except BaseException as exc:
            failures.append(exc)

    held = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        thread = threading.Thread(target=submit)
        thread.start()
        thread.join()
        event = stream.record()
        was_done = event.is_done()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not failures
    assert not was_done, "the copy was waited for"
    assert torch.cuda.memory_allocated() == held
    event.synchronize()
    assert isinstance(slot.tensor, torch.Tensor)
    assert torch.equal(slot.tensor.view(torch.float32), torch.full_like(values, 3.0))


def test_a_table_that_is_dropped_while_it_runs_still_copies_all() -> None:
    device = CudaDevice(0)
    rows = [
        Row(torch.full((1000,), float(k), device=GPU), (1000,), 0, (1,), torch.float32, 4000 * k, (1,))
        for k in range(200)
    ]
    slot = device.allocate(4000 * 200, "device")
    stream = device.open_stream("copies")
    tables = [KernelTable(rows, into_slot=True)]
    torch.cuda.synchronize()

    def work() -> None:
        torch.cuda._sleep(100_000_000)
        tables.pop().run(slot, 0)

    stream.submit(work)
    # In the stream in which the table was made, and of its size: torch would hand out its memory.
    reused = [torch.full((nbytes,), 0x7F, dtype=torch.uint8, device=GPU) for nbytes in range(512, 32768, 512)]
    stream.record().synchronize()
    del reused
    assert isinstance(slot.tensor, torch.Tensor)
    expected = torch.arange(200.0).repeat_interleave(1000)
    assert torch.equal(slot.tensor.view(torch.float32).cpu(), expected)


def test_a_storage_that_moved_is_noticed_before_its_old_memory_is_used() -> None:
    tensor = torch.ones(8, device=GPU)
    table = KernelTable([Row(tensor, (8,), 0, (1,), torch.float32, 0, (1,))], into_slot=True)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(LayoutError, match="resized since the worker connected"):
        table.run(CudaDevice(0).allocate(32, "device"), 0)


def test_a_forgotten_slot_is_let_go() -> None:
    tensor = torch.ones(2**18, device=GPU)
    table = KernelTable([Row(tensor, (2**18,), 0, (1,), torch.float32, 0, (1,))], into_slot=True)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    slot = CudaDevice(0).allocate(2**20, "device")
    table.run(slot, 0)
    table.forget(slot)
    del slot
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == held


def test_the_cubin_of_this_gpu_is_kept(tmp_path) -> None:
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability(0))
    assert load_cubin(arch, Cache(tmp_path)) == load_cubin(arch, Cache(tmp_path))
    assert len(list(tmp_path.iterdir())) == 1
