"""GridTable: the source of the CUDA kernel, compiled as C++ and run on the CPU."""

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
from wbridge.device.kernels.descriptors import build_descriptors
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
        start = self._table.memory.data_ptr()
        library().run_grid(
            ctypes.c_uint(NUM_BLOCKS),
            *map(
                ctypes.c_void_p, (start, start + self._table.loops_offset, start + self._table.tiles_offset)
            ),
            ctypes.c_int64(self._table.num_tiles),
            ctypes.c_void_p(memory.data_ptr() + base),
            ctypes.c_int64(self._into_slot),
        )

    def forget(self, buffer: Buffer) -> None:
        return


@functools.cache
def library() -> ctypes.CDLL:
    """Compile with the undefined-behaviour sanitizer: an access that a GPU refuses, a misaligned one, ends
    the process with a message."""
    source = str(files("wbridge.device.kernels") / "strided.cu")
    assert COMPILER is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "grid.so"
        options = ["-std=c++17", "-O1", "-Wall", "-Wno-unknown-pragmas", "-shared", "-fPIC"]
        options += ["-fsanitize=undefined", "-fno-sanitize-recover=all", "-static-libubsan"]
        if "libasan" in os.environ.get("LD_PRELOAD", ""):  # `nox -s sanitize`
            options.append("-fsanitize=address")
        options += [f'-DKERNEL_SOURCE="{source}"', "-o", str(path)]
        subprocess.run([COMPILER, *options, str(Path(__file__).with_name("grid.cpp"))], check=True)
        return ctypes.CDLL(str(path))
