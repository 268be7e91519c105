"""GridTable, grid_digest: the sources of the CUDA kernels, compiled as C++ and run on the CPU."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import torch

from wbridge.device.base import Buffer
from wbridge.device.kernels.descriptors import Descriptors, build_descriptors
from wbridge.device.kernels.digests import Digested, describe
from wbridge.device.tables import Row

COMPILER = shutil.which("g++")
NUM_BLOCKS = 3
"""Few, so that warps have several tiles; the kernel works with any number."""


class GridTable:
    """The same protocol as the tables of the product."""

    def __init__(self, rows: Sequence[Row], *, into_slot: bool) -> None:
        self._rows = rows  # keeps the storages
        self._into_slot = into_slot
        self._table = build_descriptors(rows, into_slot=into_slot)

    def run(self, buffer: Buffer, base: int) -> None:
        memory = buffer.tensor
        assert isinstance(memory, torch.Tensor)
        library().run_grid(
            *_described(self._table),
            ctypes.c_void_p(memory.data_ptr() + base),
            ctypes.c_int64(self._into_slot),
        )

    def forget(self, buffer: Buffer) -> None:
        return


def grid_digest(parts: Sequence[Digested], num_sums: int) -> list[int]:
    """Return the sums that the kernel makes of the parts."""
    table, sums = describe(parts), torch.zeros(num_sums, dtype=torch.int64)
    library().run_digest(*_described(table), ctypes.c_void_p(sums.data_ptr()))
    return [total % 2**64 for total in sums.tolist()]


def _described(table: Descriptors) -> Sequence[object]:
    start = table.memory.data_ptr()
    addresses = (start, start + table.loops_offset, start + table.tiles_offset)
    return ctypes.c_uint(NUM_BLOCKS), *map(ctypes.c_void_p, addresses), ctypes.c_int64(table.num_tiles)


@functools.cache
def library() -> ctypes.CDLL:
    """Compile with the undefined-behaviour sanitizer: an access that a GPU refuses, a misaligned one, ends
    the process with a message."""
    folder_of_sources = files("wbridge.device.kernels")
    assert COMPILER is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "grid.so"
        options = ["-std=c++17", "-O1", "-Wall", "-Wno-unknown-pragmas", "-shared", "-fPIC"]
        options += ["-fsanitize=undefined", "-fno-sanitize-recover=all", "-static-libubsan"]
        if "libasan" in os.environ.get("LD_PRELOAD", ""):  # `nox -s sanitize`
            options.append("-fsanitize=address")
        for name, source in (("COPY", "strided.cu"), ("DIGEST", "digest.cu")):
            options.append(f'-D{name}_SOURCE="{folder_of_sources / source}"')
        options += ["-o", str(path)]
        subprocess.run([COMPILER, *options, str(Path(__file__).with_name("grid.cpp"))], check=True)
        return ctypes.CDLL(str(path))
