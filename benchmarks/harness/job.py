"""A job of real processes: what all of them are told, what they report, and how they are run."""

from __future__ import annotations

import multiprocessing
import os
import queue
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.cost import Cost

START_METHOD = "spawn"
PATIENCE_S = 120.0
"""No wait of a healthy job takes this long."""


@dataclass(frozen=True)
class Settings:
    """What every process of a job is told. Engines are named `engine-0`, `engine-1` and so on."""

    mode: str
    num_layers: int
    num_updates: int
    directory: str = ""
    num_trainers: int = 2
    num_engines: int = 2
    tensor_parallel: int = 2
    burst: int = 1
    """Versions that a trainer sends one after the other before it waits until they are applied."""
    compute_s: float = 0.2
    """A trainer's step before each send."""
    settle_s: float = 0.4
    """From an applied update to the trainer's bare copy; the rollouts make theirs in the middle."""
    step_s: float = 0.1
    """A rollout's step between two polls. The engines' steps end in turn, as those of independent engines
    do: workers that share a few cores would else all copy at once, which no fleet of theirs does."""
    nap_s: float = 0.0
    """How long the last engine sleeps after each update."""
    config: Mapping[str, object] = field(default_factory=dict)

    @property
    def adapter_arguments(self) -> dict[str, Any]:
        # The workers share the cores, as they would be told to on any host.
        num_workers = self.num_trainers + self.num_engines * self.tensor_parallel
        copy_threads = max(1, (os.cpu_count() or 1) // num_workers)
        values = {"mode": self.mode, "num_engines": self.num_engines, "copy_threads": copy_threads}
        values |= self.config
        return {"rendezvous": f"file://{self.directory}/rendezvous", "config": values}

    @property
    def engines(self) -> list[str]:
        return [f"engine-{k}" for k in range(self.num_engines)]

    @property
    def settle_steps(self) -> int:
        return max(1, round(self.settle_s / 2 / self.step_s))


class Channels:
    """What the processes of a job share besides the weights."""

    def __init__(self, settings: Settings) -> None:
        context = multiprocessing.get_context(START_METHOD)
        self.results: Any = context.Queue()
        self.trainers: Any = context.Barrier(settings.num_trainers)
        """The collective in which a trainer's step ends."""
        self.engines: Any = [context.Barrier(settings.tensor_parallel) for _ in settings.engines]
        """The collective in which an engine's step ends."""
        self.last_steps: Any = [context.Value("q", -1) for _ in settings.engines]
        """The step at which an engine ends, decided by its rank 0 before the collective of that step."""
        self.trained: Any = context.Event()
        self.left: Any = context.Event()
        """All engines have left the job."""


@dataclass
class TrainerReport:
    """What a trainer measured."""

    rank: int
    sends: list[tuple[int, int, Cost]] = field(default_factory=list)
    """Version, place in its burst, cost."""
    copies: list[Cost] = field(default_factory=list)
    """Bare copies of the shard that `sends` take a snapshot of."""
    shard_nbytes: int = 0
    put_nbytes: int = 0


@dataclass
class RolloutReport:
    """What a rollout worker measured."""

    engine: int
    rank: int
    polls: list[tuple[int, float, Cost]] = field(default_factory=list)
    """Version, seconds that other polls for it took before, cost of the poll that applied it."""
    copies: list[tuple[int, Cost]] = field(default_factory=list)
    """Version, cost of a bare copy from a ring in host memory to parameters after its update."""
    changes: list[tuple[int, float]] = field(default_factory=list)
    """Version, seconds that a change of threads took after its bare copy."""
    steps: list[tuple[float, int]] = field(default_factory=list)
    """When a step ended, and the version it ran with; -1 before the first."""
    is_whole: bool = True
    """The parameters held the version they were said to hold, at the end."""


Role = Callable[[int, Settings, Channels], None]


def run_job(settings: Settings, trainer: Role, rollout: Role) -> list[Any]:
    """Run one process per worker and return what each put into `Channels.results`.

    Raises:
        SystemExit: a process failed; its own message is on the terminal.
    """
    for name, value in {"OMP_NUM_THREADS": "1", "UCX_WARN_UNUSED_ENV_VARS": "n"}.items():
        os.environ.setdefault(name, value)
    with tempfile.TemporaryDirectory(prefix="wbridge-bench-") as directory:
        Path(directory).chmod(0o700)
        settings = Settings(**{**settings.__dict__, "directory": directory})
        channels = Channels(settings)
        num_rollouts = settings.num_engines * settings.tensor_parallel
        context: Any = multiprocessing.get_context(START_METHOD)
        roles = [(trainer, rank) for rank in range(settings.num_trainers)]
        roles += [(rollout, number) for number in range(num_rollouts)]
        processes = [
            context.Process(target=role, args=(number, settings, channels)) for role, number in roles
        ]
        for process in processes:
            process.start()
        try:
            reports = _collect(channels, processes, len(roles), num_rollouts)
            for process in processes:
                process.join(PATIENCE_S)
        finally:
            for process in processes:
                process.terminate()
                process.join()
    return reports


def _collect(channels: Channels, processes: Sequence[Any], num_reports: int, num_rollouts: int) -> list[Any]:
    """Wait for every report; when all engines have left, let the trainers leave."""
    reports: list[Any] = []
    while len(reports) < num_reports:
        try:
            reports.append(channels.results.get(timeout=0.5))
        except queue.Empty:
            if any(process.exitcode for process in processes):
                raise SystemExit(f"a process failed: exit codes {[p.exitcode for p in processes]}") from None
        if sum(not isinstance(report, TrainerReport) for report in reports) == num_rollouts:
            channels.left.set()
    return reports
