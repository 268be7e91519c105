"""Runs: bytes that lie in several places and go to several places of one memory, compiled once."""

from __future__ import annotations

import copy
import ctypes
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

import torch

from wbridge.device.tables import Residence


class Run(NamedTuple):
    """Contiguous bytes; `source` counts from `Runs.base`."""

    source: int
    target: int
    nbytes: int


class Runs:
    """What one put reads, and where in the peer's memory it goes. Holds the storages of `tensors`."""

    def __init__(self, runs: Iterable[Run], tensors: Sequence[torch.Tensor] = ()) -> None:
        """Without a base, sources are addresses in these tensors."""
        self.table: array[int] = array("Q", [number for run in runs for number in run])
        self.nbytes: int = sum(self.table[2::3])
        self.end: int = max(map(sum, zip(self.table[1::3], self.table[2::3], strict=True)), default=0)
        """Of the peer's bytes: none is written from here on."""
        self.base: int = 0
        self._residence = Residence(tensors)
        self._memory: memoryview | None = None

    def read_from(self, memory: memoryview) -> Self:
        """Return the same with sources that count from the start of `memory`, which must be writable."""
        based = copy.copy(self)
        based.base, based._memory = ctypes.addressof(ctypes.c_char.from_buffer(memory)), memory
        return based

    def check(self) -> None:
        """Raise LayoutError if a tensor is not where it was."""
        self._residence.check()
