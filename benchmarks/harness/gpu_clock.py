"""Clock: how long work takes on a device, and matrix products as the application's own work."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

GPU_MATMUL, HOST_MATMUL = 4096, 64
PRODUCTS_PER_STEP = 8
BF16 = torch.bfloat16


class Clock:
    """Times work on `device`; on the host it is over when its call returns."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.is_gpu = self.device.type == "cuda"

    def finish(self) -> None:
        """Wait for the calling thread's current stream."""
        if self.is_gpu:
            torch.cuda.current_stream(self.device).synchronize()

    def wall_s(self, work: Callable[[], object]) -> float:
        """From an idle device to an idle device, as a caller who waits sees it."""
        self.finish()
        begin_s = time.perf_counter()
        work()
        self.finish()
        return time.perf_counter() - begin_s

    def device_s(self, work: Callable[[], object]) -> float:
        """Between two events around the work in the current stream."""
        if not self.is_gpu:
            return self.wall_s(work)
        begin, end = Mark(), Mark()
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_s(end)

    def host_memory(self, like: torch.Tensor) -> torch.Tensor:
        """Page-locked memory of torch's own, the usual place to copy a tensor of a GPU to."""
        return torch.empty_like(like, device="cpu", pin_memory=self.is_gpu)

    def allocated_nbytes(self) -> int:
        """What torch holds on the device for this process."""
        return torch.cuda.memory_allocated(self.device) if self.is_gpu else 0

    def used_nbytes(self) -> int:
        """What all processes together hold of the device."""
        if not self.is_gpu:
            return 0
        free, total = torch.cuda.mem_get_info(self.device)
        return int(total - free)


class Mark:
    """An event with a time."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)

    def record(self) -> None:
        self._event.record()

    def synchronize(self) -> None:
        self._event.synchronize()

    def elapsed_s(self, later: Mark) -> float:
        return float(self._event.elapsed_time(later._event)) / 1e3


@dataclass(frozen=True)
class Step:
    """Some matrix products: what they took on the device, and when the host saw them begin and end."""

    begin_s: float
    end_s: float
    device_s: float


class Products:
    """An application that multiplies matrices, step after step, and keeps its device busy."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        side = GPU_MATMUL if clock.is_gpu else HOST_MATMUL
        self._left, self._right = (torch.randn(side, side, device=clock.device).to(BF16) for _ in range(2))
        self._product = torch.empty_like(self._left)
        self._running: list[tuple[Mark, Mark]] = []
        self._ended_s = time.perf_counter()
        for _ in range(20):
            self.step()
        self.drain()

    def step(self) -> Step | None:
        """Launch one step, and wait for the one before the last; return that one."""
        if not self._clock.is_gpu:
            begin_s = time.perf_counter()
            self._multiply()
            end_s = time.perf_counter()
            return Step(begin_s, end_s, end_s - begin_s)
        begin, end = Mark(), Mark()
        begin.record()
        self._multiply()
        end.record()
        self._running.append((begin, end))
        return self._finish_oldest() if len(self._running) > 2 else None

    def drain(self) -> list[Step]:
        """Wait for all steps that were launched."""
        found = []
        while self._running:
            found.append(self._finish_oldest())
        self._ended_s = time.perf_counter()
        return found

    def run(self, num_steps: int) -> list[Step]:
        self.drain()
        found = [step for _ in range(num_steps) if (step := self.step())]
        return found + self.drain()

    def _multiply(self) -> None:
        for _ in range(PRODUCTS_PER_STEP):
            torch.mm(self._left, self._right, out=self._product)

    def _finish_oldest(self) -> Step:
        begin, end = self._running.pop(0)
        end.synchronize()
        begin_s, self._ended_s = self._ended_s, time.perf_counter()
        return Step(begin_s, self._ended_s, begin.elapsed_s(end))
