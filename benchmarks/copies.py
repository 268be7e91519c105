"""Gather and scatter between parameters and slots: GB/s by shape, kernel and number of threads.

    python -m benchmarks copies --json PATH [--mb N] [--rounds N]

Every figure is the median of some rounds, each of which runs all kernels of a shape and, right before
them, one single-threaded libc `memcpy` of the same bytes between buffers of its own: the lower bound for one
thread. `ratio_to_memcpy` is a copy's time as a multiple of that memcpy's; GB/s count the bytes written.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

import torch  # noqa: E402

from wbridge.device.cpu import CpuBuffer  # noqa: E402
from wbridge.device.tables import NativeTable, Row, TorchTable  # noqa: E402
from wbridge.native.extension import set_copy_threads, why_missing  # noqa: E402

BF16 = torch.bfloat16
LIBC = ctypes.CDLL(None)
LIBC.memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class Shape(NamedTuple):
    """Rows of one workload and the bytes that they write."""

    name: str
    rows: list[Row]
    into_slot: bool
    nbytes: int


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--mb", type=int, default=256, help="bytes of each workload, in 1e6")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="workloads whose name contains this")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    print(f"{platform.machine()}, {cores} cores, torch {torch.__version__}, {why_missing() or 'native'}")
    rows: list[dict[str, object]] = []
    for make in SHAPES:
        for into_slot in (True, False):
            shape = make(options.mb * 10**6, into_slot)
            if options.only in shape.name:
                rows += measure(shape, rounds=options.rounds, cores=cores)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


def measure(shape: Shape, *, rounds: int, cores: int) -> list[dict[str, object]]:
    buffer = CpuBuffer(shape.nbytes, "pinned")
    kernels: dict[str, Callable[[], object]] = {"memcpy": bare_copy(shape.nbytes)}
    torch.set_num_threads(1)
    torch_table = TorchTable(shape.rows, into_slot=shape.into_slot)
    kernels["torch"] = lambda: torch_table.run(buffer, 0)
    if why_missing() is None:
        native = NativeTable(shape.rows, into_slot=shape.into_slot)
        for num_threads in sorted({1, min(cores, 4)}):

            def run(num_threads: int = num_threads) -> None:
                set_copy_threads(num_threads)
                native.run(buffer, 0)

            kernels[f"native {num_threads}"] = run
    seconds: dict[str, list[float]] = {name: [] for name in kernels}
    for _ in range(rounds + 1):
        for name, kernel in kernels.items():
            start = time.perf_counter()
            kernel()
            seconds[name].append(time.perf_counter() - start)
    bound = statistics.median(seconds["memcpy"][1:])
    found = []
    for name, times in seconds.items():
        median = statistics.median(times[1:])
        gb_per_s, ratio = shape.nbytes / median / 1e9, median / bound
        print(f"{shape.name:34} {name:9} {median * 1e3:8.2f} ms {gb_per_s:7.2f} GB/s  {ratio:6.2f} x memcpy")
        case = {"case": shape.name, "system": name, "nbytes": shape.nbytes, "num_rows": len(shape.rows)}
        found.append({**case, "metric": "gb_per_s", "value": round(gb_per_s, 3), "unit": "GB/s"})
        found.append({**case, "metric": "ratio_to_memcpy", "value": round(ratio, 3), "unit": "x"})
    return found


def bare_copy(nbytes: int) -> Callable[[], object]:
    source, target = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))
    return lambda: LIBC.memcpy(target.data_ptr(), source.data_ptr(), nbytes)


def contiguous(nbytes: int, into_slot: bool) -> Shape:
    """One tensor, whole."""
    tensor = torch.ones(nbytes // 2, dtype=BF16)
    return shape("contiguous", [row(tensor, (nbytes // 2,), (1,), 0)], into_slot)


def runs(run_nbytes: int) -> Callable[[int, bool], Shape]:
    """Columns of matrices with rows twice as long: tensor parallelism over the columns."""

    def make(nbytes: int, into_slot: bool) -> Shape:
        width, height = run_nbytes // 2, 1024
        count = max(nbytes // (height * run_nbytes), 1)
        tensors = [torch.ones(height, 2 * width, dtype=BF16) for _ in range(count)]
        rows = [
            row(tensor, (height, width), (2 * width, 1), k * height * run_nbytes)
            for k, tensor in enumerate(tensors)
        ]
        return shape(f"columns, runs of {run_nbytes} B", rows, into_slot)

    return make


def small(tensor_nbytes: int) -> Callable[[int, bool], Shape]:
    """Many tensors, each with memory of its own."""

    def make(nbytes: int, into_slot: bool) -> Shape:
        count = nbytes // tensor_nbytes
        tensors = [torch.ones(tensor_nbytes // 2, dtype=BF16) for _ in range(count)]
        rows = [row(t, (t.numel(),), (1,), k * tensor_nbytes) for k, t in enumerate(tensors)]
        return shape(f"tensors of {tensor_nbytes} B", rows, into_slot)

    return make


def transposed(dtype: torch.dtype) -> Callable[[int, bool], Shape]:
    def make(nbytes: int, into_slot: bool) -> Shape:
        side, count = 4096, max(nbytes // (4096 * 4096 * dtype.itemsize), 1)
        tensors = [torch.ones(side, side, dtype=dtype) for _ in range(count)]
        size = side * side * dtype.itemsize
        rows = [row(t, (side, side), (1, side), k * size) for k, t in enumerate(tensors)]
        return shape(f"transpose, {str(dtype).removeprefix('torch.')}", rows, into_slot)

    return make


def cast(nbytes: int, into_slot: bool) -> Shape:
    """Master weights in float32, bfloat16 on the way."""
    tensor = torch.ones(nbytes // 4)
    return shape("float32 as bfloat16", [row(tensor, (tensor.numel(),), (1,), 0, slot=BF16)], into_slot)


def row(
    tensor: torch.Tensor,
    extents: tuple[int, ...],
    strides: tuple[int, ...],
    slot_offset: int,
    slot: torch.dtype | None = None,
) -> Row:
    packed = (1,) if len(extents) == 1 else (extents[1], 1)
    return Row(tensor, extents, 0, strides, slot or tensor.dtype, slot_offset, packed)


def shape(name: str, rows: list[Row], into_slot: bool) -> Shape:
    nbytes = 0
    for each in rows:
        numel = each.extents[0] * (each.extents[1] if len(each.extents) == 2 else 1)
        nbytes += numel * each.slot_dtype.itemsize
    return Shape(f"{'gather' if into_slot else 'scatter'} {name}", rows, into_slot, nbytes)


SHAPES: tuple[Callable[[int, bool], Shape], ...] = (
    contiguous,
    *(runs(nbytes) for nbytes in (2, 8, 64, 256, 1024, 4096, 16384)),
    *(small(nbytes) for nbytes in (256, 8192, 65536)),
    *(transposed(dtype) for dtype in (torch.uint8, BF16, torch.float32)),
    cast,
)

if __name__ == "__main__":
    main()
