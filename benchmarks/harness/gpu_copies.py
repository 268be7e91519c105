"""Gather and scatter on a GPU: GB/s of the strided kernel, of torch, and of a plain copy of as many bytes.

    PYTHONPATH=src python3 benchmarks/harness/gpu_copies.py [--json PATH] [--mb N] [--host-blocks 8,32,128]

The lower bound is a plain copy that moves the same bytes between the same kinds of memory, in the same round.
Of a cast it is half of what is read and written. `ratio` is the kernel's speed over the plain copy's;
`bar` is what it must reach. `submit_us` is what a run costs the submitting thread. Times are of CUDA events,
medians of some rounds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from wbridge.device.base import MemoryKind
from wbridge.device.cuda import CudaDevice
from wbridge.device.kernels import table as kernel_table
from wbridge.device.kernels.program import why_missing
from wbridge.device.kernels.table import KernelTable
from wbridge.device.tables import Row, Table, TorchTable

RUNS = (64, 128, 256, 512, 1024, 4096, 16384, 65536, 262144, 1048576)
NUM_TENSORS = 20_000
ROUNDS = 7
TORCH_ROUNDS = 2
"""Torch starts one kernel per row, which takes its time."""
BF16 = torch.bfloat16

Result = dict[str, object]


class Shape(NamedTuple):
    """Rows of one workload. `nbytes` is what the plain copy moves."""

    name: str
    rows: list[Row]
    slot_nbytes: int
    nbytes: int
    bar: float | None = None


def measure_copies(device: str = "cuda:0", *, nbytes: int = 512 * 2**20) -> list[Result]:
    """Measure all shapes of about `nbytes` in both directions, in device memory and in pinned host memory.

    Takes less than half a minute and some `6 * nbytes` of GPU memory.

    Raises:
        NativeUnavailable: there is no GPU, or its kernel cannot be had.
    """
    index = torch.device(device).index or 0
    results: list[Result] = []
    with torch.cuda.device(index):
        for shape in iter_shapes(nbytes, device):
            results += [measure(shape, index, into_slot=into, kind="device") for into in (True, False)]
        for shape in iter_host_shapes(nbytes // 4, device):
            results += [measure(shape, index, into_slot=into, kind="pinned") for into in (True, False)]
    return results


def iter_shapes(nbytes: int, device: str) -> Iterator[Shape]:
    yield whole(nbytes, device)
    for run in RUNS:
        yield columns(nbytes, run, device)
    yield tensors(range(8 * 1024, 64 * 1024, 512), device)
    yield tensors(range(256, 257), device)
    yield one_huge_and_many_tiny(nbytes, device)
    for dtype in (BF16, torch.float32):
        yield transpose(nbytes, dtype, device)
    yield cast(nbytes, device)


def iter_host_shapes(nbytes: int, device: str) -> Iterator[Shape]:
    yield whole(nbytes, device)
    yield columns(nbytes, 4096, device)
    yield tensors(range(8 * 1024, 64 * 1024, 512), device)
    narrow = cast(nbytes, device)
    yield narrow._replace(nbytes=narrow.slot_nbytes)  # only the slot's bytes cross the bus


def whole(nbytes: int, device: str) -> Shape:
    """One tensor. Every shape's memory is its own: no copy finds its bytes in a cache."""
    values = torch.ones(nbytes // 2, dtype=BF16, device=device)
    return Shape("one tensor", [Row(values, (nbytes // 2,), 0, (1,), BF16, 0, (1,))], nbytes, nbytes, 0.8)


def columns(nbytes: int, run: int, device: str) -> Shape:
    """Half the columns of a matrix: runs with gaps of the same length."""
    num_rows, width = nbytes // run, run // 2
    values = torch.ones(num_rows, 2 * width, dtype=BF16, device=device)
    row = Row(values, (num_rows, width), 0, (2 * width, 1), BF16, 0, (width, 1))
    bar = 0.8 if run >= 4096 else 0.5 if run >= 512 else None
    return Shape(f"runs of {run} B", [row], nbytes, nbytes, bar)


def tensors(sizes: range, device: str) -> Shape:
    chosen = random.Random(1).choices(sizes, k=NUM_TENSORS)
    values = torch.ones(sum(chosen) // 2, dtype=BF16, device=device)
    rows, start = [], 0
    for size in chosen:
        rows.append(Row(values, (size // 2,), start // 2, (1,), BF16, start, (1,)))
        start += size
    name = f"{NUM_TENSORS} tensors of {sizes[0]} to {sizes[-1]} B"
    return Shape(name, rows, start, start)


def one_huge_and_many_tiny(nbytes: int, device: str) -> Shape:
    huge, tiny = whole(nbytes, device), tensors(range(256, 257), device)
    rows = [msgspec.structs.replace(row, slot_offset=row.slot_offset + nbytes) for row in tiny.rows]
    total = nbytes + tiny.nbytes
    return Shape(f"one huge tensor and {NUM_TENSORS} of 256 B", huge.rows + rows, total, total)


def transpose(nbytes: int, dtype: torch.dtype, device: str) -> Shape:
    side = int((nbytes / dtype.itemsize) ** 0.5) // 64 * 64
    values = torch.ones(side, side, dtype=dtype, device=device)
    total = side * side * dtype.itemsize
    row = Row(values, (side, side), 0, (1, side), dtype, 0, (side, 1))
    return Shape(f"transpose of {dtype}", [row], total, total)


def cast(nbytes: int, device: str) -> Shape:
    """Parameters in float32, bfloat16 in the slot."""
    numel = nbytes // 4
    values = torch.ones(numel, dtype=torch.float32, device=device)
    return Shape("float32 with a bfloat16 slot", [Row(values, (numel,), 0, (1,), BF16, 0, (1,))],
                 2 * numel, 3 * numel)  # fmt: skip


def measure(shape: Shape, index: int, *, into_slot: bool, kind: MemoryKind) -> Result:
    buffer = CudaDevice(index).allocate(shape.slot_nbytes, kind)
    table = KernelTable(shape.rows, into_slot=into_slot)
    twin = TorchTable(shape.rows, into_slot=into_slot)
    plain = plain_copy(shape.nbytes, index, into_slot=into_slot, kind=kind)
    works: dict[str, Callable[[], object]] = {
        "plain": plain, "kernel": lambda: table.run(buffer, 0), "torch": lambda: twin.run(buffer, 0)
    }  # fmt: skip
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for name in works:
        timed(works[name])  # warms up
    for k in range(ROUNDS):
        for name in works:
            if name != "torch" or k < TORCH_ROUNDS:
                seconds[name].append(timed(works[name]))
    speeds = {name: shape.nbytes / statistics.median(times) / 1e9 for name, times in seconds.items()}
    ratio = speeds["kernel"] / speeds["plain"]
    return {
        "shape": shape.name,
        "direction": "gather" if into_slot else "scatter",
        "slot": kind,
        "nbytes": shape.nbytes,
        **{f"{name}_gb_s": round(speed, 1) for name, speed in speeds.items()},
        "ratio": round(ratio, 3),
        "bar": shape.bar if kind == "device" else None,
        "ok": None if shape.bar is None or kind != "device" else ratio >= shape.bar,
        "submit_us": round(submit_us(table, buffer), 1),
    }


def plain_copy(nbytes: int, index: int, *, into_slot: bool, kind: MemoryKind) -> Callable[[], object]:
    here = torch.ones(nbytes, dtype=torch.uint8, device=torch.device("cuda", index))
    there = CudaDevice(index).allocate(nbytes, kind).tensor
    assert isinstance(there, torch.Tensor)
    to, source = (there, here) if into_slot else (here, there)
    return lambda: to.copy_(source, non_blocking=True)


def timed(work: Callable[[], object]) -> float:
    """Seconds on the GPU, which is kept busy while the work is submitted."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(1_000_000)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def submit_us(table: Table, buffer: object) -> float:
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        table.run(buffer, 0)  # type: ignore[arg-type]  # a buffer of the device
        times.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
    return statistics.median(times) * 1e6


def print_results(results: list[Result]) -> None:
    names = ("shape", "direction", "slot", "plain_gb_s", "kernel_gb_s", "torch_gb_s", "ratio", "bar", "ok",
             "submit_us")  # fmt: skip
    rows = [names, *(tuple(str(result[name]) for name in names) for result in results)]
    widths = [max(len(row[k]) for row in rows) for k in range(len(names))]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--mb", type=int, default=512, help="MiB of each workload")
    parser.add_argument(
        "--host-blocks", default="", help="also try these numbers of blocks with pinned slots"
    )
    options = parser.parse_args()
    if missing := why_missing(0):
        print(f"the kernel is not available: {missing}", file=sys.stderr)
        return 1
    results = measure_copies(nbytes=options.mb * 2**20)
    for num_blocks in filter(None, options.host_blocks.split(",")):
        kernel_table._MAX_HOST_BLOCKS = int(num_blocks)  # type: ignore[misc]  # to choose the constant by
        for shape in iter_host_shapes(options.mb * 2**18, "cuda:0"):
            named = shape._replace(name=f"{shape.name}, {num_blocks} blocks")
            results += [measure(named, 0, into_slot=into, kind="pinned") for into in (True, False)]
    print_results(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(result["ok"] is not False for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
