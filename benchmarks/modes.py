"""Measure what an update stalls, in the four modes, between real processes.

    python -m benchmarks modes --json PATH [--reference DIR]

Two trainers hold the halves of a model, two engines of two tensor-parallel workers run it. Steps wait on a
timer, as a step on an accelerator does. The bare copy is the device copy of the same bytes with nothing
around it: trainer shard to host memory, host ring to rollout parameters. It is timed in the same processes
after each update. Ratios are median over median. AGST is the stall averaged over all workers, per version;
EWTT runs from the first send to the end of the last apply; staleness is how many versions a rollout's step
ran behind the newest that had been sent, on average.

`--reference DIR` names the folder with `lockstep_bench.py` and `e2e_cpu.py`, which run the published PyPI
package `wbridge` (another project) on a CPU, in a virtual environment made for it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.harness.cost import Cost, median_ms  # noqa: E402  # needs the path
from benchmarks.harness.idle import IdleReport, run_idle_rollout, run_idle_trainer  # noqa: E402
from benchmarks.harness.job import RolloutReport, Settings, TrainerReport, run_job  # noqa: E402
from benchmarks.harness.model import LAYER_HALF_NBYTES  # noqa: E402
from benchmarks.harness.reference import measure_reference  # noqa: E402
from benchmarks.harness.rollout import run_rollout  # noqa: E402
from benchmarks.harness.trainer import run_trainer  # noqa: E402

MODES = ("sync", "sender_overlap", "receiver_overlap", "async")
ENGINE_SIZES = {"tp2": 2, "tp4": 4, "tp8": 8}
REFERENCE = "weightbridge-0.1.0"
NAP_S = 0.8
BURST = 3
SLOW_COPY_GB_S = 1.25
"""A worker that copies twice as fast as this ends in half a step, before the other engine begins."""
QUIET = {"heartbeat_s": 60.0}
"""While polls are counted, no lease is renewed: a heartbeat is no frame of a poll."""

Row = dict[str, object]


def main() -> None:
    options = parse_arguments()
    num_layers = max(1, options.shard_mb * 10**6 // LAYER_HALF_NBYTES)
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"shard {num_layers * LAYER_HALF_NBYTES / 1e6:.0f} MB per trainer, {options.updates} updates")
    rows: list[Row] = []
    cases = options.case or [*MODES, *ENGINE_SIZES]
    for mode in cases:
        settings = settings_of(mode, num_layers, options.updates)
        found = measure_idle(mode) if mode in ENGINE_SIZES else measure_mode(settings)
        if mode == "async" and options.rounds:
            found |= measure_independence(settings, options.rounds)
        rows += report(mode, "wbridge", found)
    if options.reference:
        for case, found in measure_reference(options.reference, NAP_S, cases).items():
            rows += report(case, REFERENCE, found)
    else:
        print("reference: not measured; name the folder of its scripts with --reference")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


def report(case: str, system: str, found: dict[str, float]) -> list[Row]:
    """Print what was found, and return it as rows."""
    for metric, value in found.items():
        print(f"{case:17} {system:19} {metric:29} {value:12.3f} {unit_of(metric)}", flush=True)
    return [
        {"benchmark": "modes", "case": case, "system": system, "metric": metric}
        | {"value": round(value, 3), "unit": unit_of(metric)}
        for metric, value in found.items()
    ]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--case", choices=[*MODES, *ENGINE_SIZES], action="append", help="only these cases")
    parser.add_argument("--reference", type=Path, help="the folder with the reference's scripts")
    parser.add_argument("--shard-mb", type=int, default=272, help="of each trainer")
    parser.add_argument("--updates", type=int, default=30, help="measured updates per mode")
    parser.add_argument(
        "--rounds", type=int, default=10, help="bursts of three updates beside a sleeper; 0: skip"
    )
    return parser.parse_args()


def settings_of(mode: str, num_layers: int, num_updates: int) -> Settings:
    """Steps so long that an engine's copies end before the next engine's step: two engines that copied at the
    same time would compete for the cores that the workers of a fleet do not share."""
    step_s = max(0.1, num_layers * LAYER_HALF_NBYTES / SLOW_COPY_GB_S / 1e9)
    return Settings(mode, num_layers, num_updates, step_s=step_s, settle_s=4 * step_s)


def unit_of(metric: str) -> str:
    units = {"ratio": "ratio", "ms": "ms", "versions": "versions", "p50": "us"}
    return units.get(metric.rpartition("_")[2], "count")


def measure_mode(settings: Settings) -> dict[str, float]:
    trainers, rollouts = run(settings)
    sends = [cost for report in trainers for _, _, cost in report.sends]
    polls = [cost for report in rollouts for _, _, cost in measured(report, trainers)]
    shard_copies = [cost for report in trainers for cost in report.copies]
    ring_copies = [cost for report in rollouts for _, cost in report.copies]
    agst_s, ewtt_s = per_version(trainers, rollouts)
    return {
        "trainer_stall_ratio": median_ms(c.wall_s for c in sends) / median_ms(c.wall_s for c in shard_copies),
        "rollout_stall_ratio": median_ms(c.wall_s for c in polls) / median_ms(c.wall_s for c in ring_copies),
        "agst_ms": median_ms(agst_s),
        "ewtt_ms": median_ms(ewtt_s),
        "staleness_versions": staleness(trainers, rollouts),
        **described("trainer_stall", sends),
        **described("trainer_copy", shard_copies),
        **described("rollout_stall", polls),
        **described("rollout_copy", ring_copies),
        "rollout_slowest_copy_ms": median_ms(slowest_copies(rollouts)),
    }


def described(name: str, costs: list[Cost]) -> dict[str, float]:
    """What lies beside a wall time: CPU time of the calling thread and of its process, and how the process
    competed for cores."""
    return {
        f"{name}_ms": median_ms(cost.wall_s for cost in costs),
        f"{name}_thread_cpu_ms": median_ms(cost.thread_cpu_s for cost in costs),
        f"{name}_process_cpu_ms": median_ms(cost.process_cpu_s for cost in costs),
        f"{name}_switches": statistics.median(cost.num_switches for cost in costs),
        f"{name}_queued_ms": median_ms(cost.queued_s for cost in costs),
    }


def slowest_copies(rollouts: list[RolloutReport]) -> list[float]:
    """Each engine's slowest bare copy after each update: in lockstep, all its workers wait for that one."""
    return slowest((told.engine, version, cost.wall_s) for told in rollouts for version, cost in told.copies)


def slowest(times: Iterable[tuple[int, int, float]]) -> list[float]:
    """The longest of the times of each engine and version."""
    found: dict[tuple[int, int], float] = {}
    for engine, version, time_s in times:
        found[engine, version] = max(found.get((engine, version), 0.0), time_s)
    return list(found.values())


def run(settings: Settings) -> tuple[list[TrainerReport], list[RolloutReport]]:
    reports = run_job(settings, run_trainer, run_rollout)
    trainers = [report for report in reports if isinstance(report, TrainerReport)]
    rollouts = [report for report in reports if isinstance(report, RolloutReport)]
    for report in rollouts:
        if not report.is_whole:
            raise SystemExit(f"engine {report.engine}, rank {report.rank}: the weights are not its version's")
    return trainers, rollouts


def measured(report: RolloutReport, trainers: list[TrainerReport]) -> list[tuple[int, float, Cost]]:
    """The updates of versions that the trainers measured too."""
    versions = {version for version, _, _ in trainers[0].sends}
    return [poll for poll in report.polls if poll[0] in versions]


def per_version(
    trainers: list[TrainerReport], rollouts: list[RolloutReport]
) -> tuple[list[float], list[float]]:
    """AGST and EWTT of each version that every worker has applied."""
    stalls: dict[int, list[float]] = {}
    begins: dict[int, list[float]] = {}
    ends: dict[int, list[float]] = {}
    for report in trainers:
        for version, _, cost in report.sends:
            stalls.setdefault(version, []).append(cost.wall_s)
            begins.setdefault(version, []).append(cost.begin_s)
    for follower in rollouts:
        for version, asked_s, cost in measured(follower, trainers):
            stalls[version].append(asked_s + cost.wall_s)
            ends.setdefault(version, []).append(cost.end_s)
    num_workers = len(trainers) + len(rollouts)
    whole = [version for version, found in stalls.items() if len(found) == num_workers]
    return [statistics.mean(stalls[v]) for v in whole], [max(ends[v]) - min(begins[v]) for v in whole]


def staleness(trainers: list[TrainerReport], rollouts: list[RolloutReport]) -> float:
    sent = sorted((cost.begin_s, version) for version, _, cost in trainers[0].sends)
    behind: list[int] = []
    for report in rollouts:
        newest, upcoming = sent[0][1], list(reversed(sent))
        for end_s, version in report.steps:
            if sent[0][0] <= end_s <= sent[-1][0]:
                while upcoming and upcoming[-1][0] <= end_s:
                    newest = upcoming.pop()[1]
                behind.append(newest - version)
    return statistics.mean(behind) if behind else 0.0


def measure_independence(settings: Settings, rounds: int) -> dict[str, float]:
    """What one sleeping engine costs the others: a run where it sleeps against one where it does not."""
    shared = {**settings.__dict__, "num_updates": rounds, "burst": BURST, "config": {"delivery": "latest"}}
    polls_ms, sends_ms = [], []
    for nap_s in (0.0, NAP_S):
        trainers, rollouts = run(Settings(**{**shared, "nap_s": nap_s}))
        awake = [report for report in rollouts if report.engine == 0]
        polls_ms.append(median_ms(c.wall_s for r in awake for _, _, c in measured(r, trainers)))
        sends_ms.append(
            median_ms(c.wall_s for r in trainers for _, place, c in r.sends if place == BURST - 1)
        )
    return {
        "neighbour_poll_extra_ms": polls_ms[1] - polls_ms[0],
        "third_send_extra_ms": sends_ms[1] - sends_ms[0],
        "neighbour_poll_ms": polls_ms[1],
        "third_send_ms": sends_ms[1],
    }


def measure_idle(case: str) -> dict[str, float]:
    settings = Settings(
        mode="async",
        num_layers=1,
        num_updates=1,
        num_trainers=1,
        num_engines=1,
        tensor_parallel=ENGINE_SIZES[case],
        config=QUIET,
    )
    reports = [
        report
        for report in run_job(settings, run_idle_trainer, run_idle_rollout)
        if isinstance(report, IdleReport)
    ]
    return {
        "idle_poll_us_p50": 1e6 * max(report.median_cpu_s for report in reports),
        "idle_poll_frames": sum(report.num_frames for report in reports),
        "idle_poll_system_calls": sum(report.num_system_calls for report in reports),
    }


if __name__ == "__main__":
    main()
