"""One trainer or rollout of a case: its parameters, and a system that keeps them up to date."""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from benchmarks.systems.workloads import Move, Parameters, Shape, Workload, fill_trainer, wrong_parts

MEMCPY_NBYTES = 10**9
LOOPBACK = "127.0.0.1"
IDLE_S = 30.0
"""How long a waiting process is watched."""
LIBC = ctypes.CDLL(None)
LIBC.memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


@dataclass
class Context:
    """What a system gets to know about its worker."""

    workload: Workload
    role: str
    rank: int
    options: dict[str, str]
    exchange: Callable[[Any], list[Any]]
    """Give a value, get those of all workers: trainers first. For addresses, before the first update."""
    address: str = LOOPBACK
    """Where workers on other hosts reach this one."""
    parameters: Parameters = field(default_factory=dict)

    @property
    def is_trainer(self) -> bool:
        return self.role == "trainer"

    @property
    def moves(self) -> list[Move]:
        return self.workload.moves_of(self.role, self.rank)

    def part(self, move: Move) -> torch.Tensor:
        """This worker's end of a move, as a view."""
        if self.is_trainer:
            return move.source_box.of(self.parameters[move.source])
        return move.target_box.of(self.parameters[move.target])


class Timing(NamedTuple):
    """One call of a system; begin and end on the clock that all processes of the host share."""

    begin_s: float
    end_s: float
    cpu_s: float
    """Of all threads of this process."""
    result: Any


class Worker:
    """Runs a system on one worker; its methods are called from the driver's process.

    A system is a class `System` made of a `Context`, with `setup()`, `push(version)` on trainers, which
    returns when the weights may change, `pull(version, tokens)` on rollouts, which returns when they are in
    the parameters, and `close()`. It may bring `allocate(name, shape)` for parameters in memory of its own,
    `extras(times)`, figures of its own after the updates, and `reused_s`: see `setup`.
    """

    def __init__(
        self,
        system: str,
        workload: Workload,
        options: dict[str, str],
        role: str,
        rank: int,
        exchange: Any = None,
        address: str = LOOPBACK,
    ) -> None:
        torch.set_num_threads(1)
        self._calls = CallCounter() if options.get("count_calls") else None
        self._context = Context(workload, role, rank, options, exchange, address)
        self._system = importlib.import_module(f"benchmarks.systems.{system}").System(self._context)
        allocate = getattr(self._system, "allocate", _zeros)
        shapes = self._context.workload.shapes(role)
        self._context.parameters |= {name: allocate(name, shape) for name, shape in shapes.items()}
        self._addresses: dict[str, int] = {}

    def pid(self) -> int:
        return os.getpid()

    def setup(self) -> float:
        """Return the seconds that an earlier run took for what this one reuses."""
        self._system.setup()
        self._addresses = self._where()  # from now on they stay
        return float(getattr(self._system, "reused_s", 0.0))

    def fill(self, version: int) -> None:
        if self._calls:
            self._calls.end()
        if self._context.is_trainer:
            fill_trainer(self._context.workload, self._context.rank, self._context.parameters, version)

    def memcpy(self) -> float:
        """Seconds of one single-threaded libc memcpy per byte; both buffers have all their pages."""
        source, target = memcpy_buffers()
        begin_s = time.monotonic()
        LIBC.memcpy(target.data_ptr(), source.data_ptr(), MEMCPY_NBYTES)
        return (time.monotonic() - begin_s) / MEMCPY_NBYTES

    def push(self, version: int) -> Timing:
        return self._timed(lambda: self._system.push(version))

    def pull(self, version: int, tokens: list[Any] | None = None) -> Timing:
        return self._timed(lambda: self._system.pull(version, tokens))

    def wrong(self, version: int) -> list[str]:
        """Parameters that do not hold `version`, or lie elsewhere than before."""
        context = self._context
        if self._calls:
            self._calls.end()
        if context.is_trainer:
            return []
        moved = [name for name, address in self._where().items() if address != self._addresses[name]]
        return moved + wrong_parts(context.workload, context.rank, context.parameters, version)

    def forget_peak(self) -> None:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")

    def peak_mb(self) -> float:
        """Peak of the resident memory, without the buffers of the bare memcpy."""
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return (
                    int(line.split()[1]) / 1024
                    - memcpy_buffers.cache_info().currsize * 2 * MEMCPY_NBYTES / 2**20
                )
        return 0.0

    def counted(self) -> dict[str, int]:
        """Python function calls of the last update, on all threads, by function."""
        return self._calls.found() if self._calls else {}

    def extras(self, times: int) -> dict[str, float]:
        measure = getattr(self._system, "extras", None)
        return dict(measure(times)) if measure else {}

    def close(self) -> None:
        self._system.close()

    def _where(self) -> dict[str, int]:
        return {name: tensor.data_ptr() for name, tensor in self._context.parameters.items()}

    def _timed(self, work: Callable[[], Any]) -> Timing:
        if self._calls:
            self._calls.begin()
        cpu_s, begin_s = time.process_time(), time.monotonic()
        result = work()
        return Timing(begin_s, time.monotonic(), time.process_time() - cpu_s, result)


class CallCounter:
    """Counts calls of Python functions, on this thread and on those that begin later."""

    def __init__(self) -> None:
        self._found: Counter[CodeType] = Counter()
        self._is_on = False
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def begin(self) -> None:
        self._found.clear()
        self._is_on = True

    def end(self) -> None:
        self._is_on = False

    def found(self) -> dict[str, int]:
        named: Counter[str] = Counter()
        for code, count in self._found.items():
            if not code.co_filename.startswith(str(Path(__file__).parent)):
                named[f"{Path(code.co_filename).name}:{code.co_qualname}"] += count
        return dict(named)

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        if self._is_on and event == "call":
            self._found[frame.f_code] += 1


@functools.cache
def memcpy_buffers() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(MEMCPY_NBYTES, dtype=torch.uint8), torch.zeros(MEMCPY_NBYTES, dtype=torch.uint8).fill_(
        2
    )


def _zeros(name: str, shape: Shape) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16).zero_()  # the second one gives it pages
