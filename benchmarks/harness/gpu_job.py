"""A job of one trainer and one engine in processes of their own, on one device, within a time limit."""

from __future__ import annotations

import multiprocessing
import os
import queue
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.harness.gpu_clock import Step

PATIENCE_S = 60.0
"""No wait of a healthy job takes this long."""


class JobFailed(Exception):
    """A process of the job failed or took too long; what it said is on the terminal."""


@dataclass(frozen=True)
class Job:
    """What both processes are told."""

    device: str
    mode: str
    num_layers: int
    num_updates: int
    in_place: bool = False
    """The engine's parameters lie in memory that the trainer writes directly."""
    computes: str = ""
    """`trainer` or `rollout` multiplies matrices while versions are on their way."""
    limit_s: float = 60.0
    directory: str = ""
    config: Mapping[str, object] = field(default_factory=dict)

    @property
    def adapter_arguments(self) -> dict[str, Any]:
        values = {"mode": self.mode, "num_engines": 1, "connect_timeout_s": PATIENCE_S, **self.config}
        return {"rendezvous": f"file://{self.directory}/rendezvous", "config": values}


@dataclass
class Held:
    """What an adapter and its copies hold, from before `connect` to after the last update."""

    torch_nbytes: int = 0
    resident_nbytes: int = 0
    device_nbytes: int = 0
    """Of all processes together, contexts and kernels included."""


@dataclass
class TrainerReport:
    """What the trainer measured, in seconds, for each version but the first."""

    shard_nbytes: int = 0
    stalls_s: list[float] = field(default_factory=list)
    copies_s: list[float] = field(default_factory=list)
    """The shard to page-locked memory of torch's own, with nothing around it."""
    updates_s: list[float] = field(default_factory=list)
    """From the call of `send_weights` until the engine has applied the version."""
    sends: list[tuple[float, float, float]] = field(default_factory=list)
    """When `send_weights` was called, when it returned, and when the version had landed."""
    busy: list[Step] = field(default_factory=list)
    """Steps beside a version on its way."""
    idle: list[Step] = field(default_factory=list)
    num_missed: int = 0
    held: Held = field(default_factory=Held)


@dataclass
class RolloutReport:
    """What the engine measured, in seconds, for each version but the first."""

    stalls_s: list[float] = field(default_factory=list)
    """The poll that applied it, until the parameters are there for the next kernel."""
    copies_s: list[float] = field(default_factory=list)
    """Page-locked memory of torch's own to the parameters."""
    device_copies_s: list[float] = field(default_factory=list)
    """Memory of the device to the parameters."""
    steps: list[Step] = field(default_factory=list)
    is_whole: bool = False
    held: Held = field(default_factory=Held)


class Channels:
    """What the two share besides the weights."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.results: Any = context.Queue()
        self.both: Any = context.Barrier(2)

    def meet(self) -> None:
        """Wait for the other one."""
        self.both.wait(PATIENCE_S)


Role = Callable[[Job, Channels], None]


def run_job(job: Job, trainer: Role, rollout: Role) -> tuple[TrainerReport, RolloutReport]:
    """Run both and return their reports.

    Raises:
        JobFailed: one of them did not report in time.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="wbridge-bench-") as directory:
        Path(directory).chmod(0o700)
        job, channels = replace(job, directory=directory), Channels()
        context: Any = multiprocessing.get_context("spawn")
        processes = [context.Process(target=role, args=(job, channels)) for role in (trainer, rollout)]
        for process in processes:
            process.start()
        try:
            reports = _collect(channels, processes, time.monotonic() + job.limit_s)
            for process in processes:
                process.join(PATIENCE_S)
        finally:
            for process in processes:
                process.kill()
                process.join()
    return reports[TrainerReport], reports[RolloutReport]


def _collect(channels: Channels, processes: list[Any], until_s: float) -> dict[type, Any]:
    reports: dict[type, Any] = {}
    while len(reports) < len(processes):
        try:
            report = channels.results.get(timeout=0.5)
        except queue.Empty:
            codes = [process.exitcode for process in processes]
            if any(codes):
                raise JobFailed(f"exit codes {codes} of trainer and engine") from None
            if time.monotonic() > until_s:
                raise JobFailed("trainer and engine did not end within their time") from None
        else:
            reports[type(report)] = report
    return reports
