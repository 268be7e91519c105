"""Accelerator: where the weights of a test are, and work that keeps it busy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_CYCLES_PER_MS = 2_000_000
"""Of a GPU at 2 GHz; a slower one sleeps longer."""


class Accelerator:
    """A GPU, or the host for a dry run of the tests' own code."""

    def __init__(self, kind: str) -> None:
        self.is_gpu = kind == "cuda"
        self.name = "cuda:0" if self.is_gpu else "cpu"

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """Make a stream of the test's own current in this thread. What is left in it goes on afterwards."""
        if not self.is_gpu:
            yield
            return
        with torch.cuda.stream(torch.cuda.Stream(self.name)):
            yield

    def work(self, duration_ms: float) -> None:
        """Keep the current stream busy; nobody waits for it here."""
        if self.is_gpu:
            torch.cuda._sleep(int(duration_ms * _CYCLES_PER_MS))

    def finish(self) -> None:
        """Wait for all work of this process."""
        if self.is_gpu:
            torch.cuda.synchronize(self.name)

    def used_nbytes(self) -> int:
        """What all processes together hold of the GPU."""
        if not self.is_gpu:
            return 0
        free, total = torch.cuda.mem_get_info(self.name)
        return total - free
