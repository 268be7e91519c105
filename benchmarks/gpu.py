"""Measure updates on one GPU: copies, stalls, overlap, latency and memory.

    python -m benchmarks gpu --json PATH [--only CASE] [--device cpu]

A trainer and an engine, each a process of its own, hold the same model on the same device. What they are
compared with is measured in the same processes after each update: plain copies of every tensor to and from
torch's page-locked memory, and on the device. A rollout's stall ends when the next kernel could run with the
new parameters. Ratios are median over median, slow-downs mean over mean of the same matrix products.
`--device cpu` runs the same code on the host, to try it; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402  # needs the path

from benchmarks.harness.gpu_clock import Step  # noqa: E402
from benchmarks.harness.gpu_job import Job, RolloutReport, TrainerReport, run_job  # noqa: E402
from benchmarks.harness.gpu_memory import measure_digest, measure_pinned, measure_wake  # noqa: E402
from benchmarks.harness.gpu_workers import run_rollout, run_trainer  # noqa: E402
from benchmarks.harness.model import LAYER_HALF_NBYTES  # noqa: E402
from wbridge.native.extension import why_missing  # noqa: E402

MODES = ("sync", "sender_overlap", "receiver_overlap", "async")
LARGE = {"large async": "async", "large sync": "sync"}
Row = dict[str, object]


class Bar(NamedTuple):
    """What a figure has to be at most, or at least."""

    limit: float
    is_upper: bool

    def says(self, value: float) -> str:
        met = value <= self.limit if self.is_upper else value >= self.limit
        return f"{'<=' if self.is_upper else '>='} {self.limit:g}: {'met' if met else 'MISSED'}"


BARS = {
    ("pinned", "d2h_ratio"): Bar(0.9, is_upper=False),
    ("pinned", "h2d_ratio"): Bar(0.9, is_upper=False),
    ("async", "trainer_stall_ratio"): Bar(1.15, is_upper=True),
    ("large async", "trainer_stall_ratio"): Bar(1.15, is_upper=True),
    ("overlap trainer", "slow_down_percent"): Bar(5.0, is_upper=True),
    ("overlap rollout", "slow_down_percent"): Bar(5.0, is_upper=True),
}


def main() -> int:
    options = parse_arguments()
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"no GPU is visible to torch {torch.__version__}; --device cpu tries the code without one")
        return 2
    rows = describe_machine(options.device)
    failed = []
    for case, measure in cases(options).items():
        if options.only and case not in options.only:
            continue
        begin_s = time.monotonic()
        try:
            rows += measure()
        except Exception:  # a boundary: the other cases are measured all the same
            traceback.print_exc()
            failed.append(case)
        print(f"{case}: {time.monotonic() - begin_s:.1f} s", flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the rows there, after each case")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", action="append", help="only this case; may be given again")
    parser.add_argument("--shard-mb", type=int, default=1000, help="of the trainer and of the engine")
    parser.add_argument(
        "--large-mb", type=int, default=4000, help="the same in the large cases; 0: skip them"
    )
    parser.add_argument("--updates", type=int, default=6, help="measured updates of each job")
    parser.add_argument("--rounds", type=int, default=2000, help="waits that are timed")
    return parser.parse_args()


def cases(options: argparse.Namespace) -> dict[str, Callable[[], list[Row]]]:
    """The cases in the order in which they run: what is short first."""
    device = "cuda:0" if options.device == "cuda" else "cpu"

    def job(mode: str, shard_mb: int, num_updates: int = options.updates, **more: object) -> Job:
        num_layers = max(1, shard_mb * 10**6 // (2 * LAYER_HALF_NBYTES))
        return Job(device=device, mode=mode, num_layers=num_layers, num_updates=num_updates, **more)

    def jobs(case: str, measured: Job) -> Callable[[], list[Row]]:
        return lambda: report(case, measure_job(measured))

    pinned_nbytes, rounds = options.shard_mb * 10**6, options.rounds
    found: dict[str, Callable[[], list[Row]]] = {
        "pinned": lambda: report("pinned", measure_pinned(device, nbytes=pinned_nbytes, rounds=9)),
        "wake": lambda: report("wake", measure_wake(device, rounds=rounds)),
        "digest": lambda: report("digest", measure_digest(device, nbytes=pinned_nbytes, rounds=5)),
    }
    for mode in MODES:
        found[mode] = jobs(mode, job(mode, options.shard_mb))
    found["in place"] = jobs("in place", job("sync", options.shard_mb, in_place=True))
    for role in ("trainer", "rollout"):
        found[f"overlap {role}"] = jobs(f"overlap {role}", job("async", options.shard_mb, computes=role))
    if device != "cpu":
        found["copies"] = lambda: measure_gpu_copies(device)
    if options.large_mb:
        for case, mode in LARGE.items():
            found[case] = jobs(case, job(mode, options.large_mb, 3, limit_s=100.0))
    return found


def measure_gpu_copies(device: str) -> list[Row]:
    """Strided copies of one launch against plain ones; the bars are those of the measurement itself."""
    from benchmarks.harness.gpu_copies import measure_copies  # needs a GPU and CUDA's compiler

    rows: list[Row] = []
    for found in measure_copies(device):
        case = f"{found['direction']} {found['shape']}, {found['slot']} slot"
        verdict = {None: "", True: f">= {found['bar']}: met", False: f">= {found['bar']}: MISSED"}[
            found["ok"]
        ]
        figures = {name: value for name, value in found.items() if isinstance(value, float) and name != "bar"}
        print(f"{case:60} {figures} {verdict}".rstrip(), flush=True)
        for name, value in {**figures, "nbytes": found["nbytes"]}.items():
            unit = {"nbytes": "B", "ratio": "ratio"}.get(name, unit_of(name))
            rows.append({"benchmark": "gpu", "case": case, "metric": name, "value": value, "unit": unit})
    return rows


def measure_job(job: Job) -> dict[str, float]:
    trainer, rollout = run_job(job, run_trainer, run_rollout)
    if not rollout.is_whole:
        raise RuntimeError(f"{job.mode}: the engine's weights are not its version's")
    if job.computes:
        return slow_down(job, trainer, rollout)
    stall_s, poll_s = (statistics.median(each.stalls_s) for each in (trainer, rollout))
    to_host_s, from_host_s = (statistics.median(each.copies_s) for each in (trainer, rollout))
    on_device_s, update_s = statistics.median(rollout.device_copies_s), statistics.median(trainer.updates_s)
    return {
        "trainer_stall_ratio": stall_s / to_host_s,
        "rollout_stall_ratio": poll_s / from_host_s,
        "update_to_device_copy_ratio": update_s / on_device_s,
        "trainer_stall_ms": 1e3 * stall_s,
        "trainer_slowest_stall_ms": 1e3 * max(trainer.stalls_s),
        "rollout_stall_ms": 1e3 * poll_s,
        "rollout_slowest_stall_ms": 1e3 * max(rollout.stalls_s),
        "update_ms": 1e3 * update_s,
        "bare_d2h_ms": 1e3 * to_host_s,
        "bare_h2d_ms": 1e3 * from_host_s,
        "bare_d2d_ms": 1e3 * on_device_s,
        "update_gb_per_s": trainer.shard_nbytes / update_s / 1e9,
        "shard_mb": trainer.shard_nbytes / 1e6,
        "missed_count": trainer.num_missed,
        "trainer_torch_mb": trainer.held.torch_nbytes / 1e6,
        "rollout_torch_mb": rollout.held.torch_nbytes / 1e6,
        "both_device_mb": trainer.held.device_nbytes / 1e6,
        "trainer_resident_mb": trainer.held.resident_nbytes / 1e6,
        "rollout_resident_mb": rollout.held.resident_nbytes / 1e6,
    }


def slow_down(job: Job, trainer: TrainerReport, rollout: RolloutReport) -> dict[str, float]:
    """What a version on its way costs who computes: the trainer from `send_weights`' return until it has
    landed, the engine also while the trainer takes its snapshot."""
    if job.computes == "trainer":
        return compared("slow_down", trainer.busy, trainer.idle)
    whole = [(called_s, landed_s) for called_s, _, landed_s in trainer.sends]
    snapshots = [(called_s, returned_s) for called_s, returned_s, _ in trainer.sends]
    since_s = trainer.sends[0][0] - 0.05
    idle = [s for s in rollout.steps if s.begin_s > since_s and not within([s], whole, partly=True)]
    return {
        **compared("slow_down", within(rollout.steps, whole), idle),
        **compared("snapshot_slow_down", within(rollout.steps, snapshots, partly=True), idle),
    }


def within(steps: Iterable[Step], spans: list[tuple[float, float]], *, partly: bool = False) -> list[Step]:
    def is_in(step: Step, begin_s: float, end_s: float) -> bool:
        if partly:
            return step.end_s > begin_s and step.begin_s < end_s
        return begin_s <= step.begin_s and step.end_s <= end_s

    return [step for step in steps if any(is_in(step, *span) for span in spans)]


def compared(name: str, busy: list[Step], idle: list[Step]) -> dict[str, float]:
    if not busy or not idle:
        raise RuntimeError(f"{len(busy)} steps beside a version and {len(idle)} without: nothing to compare")
    means = [statistics.mean(step.device_s for step in steps) for steps in (busy, idle)]
    medians = [statistics.median(step.device_s for step in steps) for steps in (busy, idle)]
    return {
        f"{name}_percent": 100 * (means[0] / means[1] - 1),
        f"{name}_of_medians_percent": 100 * (medians[0] / medians[1] - 1),
        f"{name}_busy_step_ms": 1e3 * means[0],
        f"{name}_idle_step_ms": 1e3 * means[1],
        f"{name}_busy_steps_count": len(busy),
        f"{name}_idle_steps_count": len(idle),
    }


def report(case: str, found: dict[str, float]) -> list[Row]:
    """Print what was found, and return it as rows."""
    rows: list[Row] = []
    for metric, value in found.items():
        unit = unit_of(metric)
        bar = BARS.get((case, metric))
        verdict = bar.says(value) if bar else ""
        print(f"{case:17} {metric:38} {value:12.3f} {unit:7} {verdict}".rstrip(), flush=True)
        rows.append(
            {"benchmark": "gpu", "case": case, "metric": metric, "value": round(value, 4), "unit": unit}
        )
    return rows


def unit_of(metric: str) -> str:
    if metric.endswith(("gb_per_s", "gb_s")):
        return "GB/s"
    units = {"ratio": "ratio", "ms": "ms", "us": "us", "mb": "MB", "percent": "%"}
    return units.get(metric.rpartition("_")[2], "count")


def describe_machine(device: str) -> list[Row]:
    """The card, its driver and what ran on it, as rows of text."""
    found = {
        "card": torch.cuda.get_device_name(0) if device == "cuda" else platform.processor() or "cpu",
        "driver": driver_version() if device == "cuda" else "none",
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": str(len(os.sched_getaffinity(0))),
        "native": why_missing() or "used",
    }
    print(", ".join(f"{name} {value}" for name, value in found.items()), flush=True)
    return [
        {"benchmark": "gpu", "case": "machine", "metric": name, "value": value, "unit": ""}
        for name, value in found.items()
    ]


def driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError) as exc:
        return f"unknown: {exc}"


if __name__ == "__main__":
    sys.exit(main())
