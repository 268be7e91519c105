"""Compare what `wbridge advise` predicts with what a job measures, in the four modes on two slow links.

    python -m benchmarks advise --json PATH        (as root, on Linux, with iproute2)

Each trainer and each engine of the job lives on a host of its own: a network namespace whose link is limited
in both directions. Two trainers hold the halves of a model, two engines of two tensor-parallel workers run
it; steps wait on a timer. The prediction starts from speeds that are measured here: all links at once, by
what `wbridge advise --link` runs; gathering and checksums by what `--measure` runs; and between the updates,
in the job's processes, the two copies in which the modes differ, with nothing around them, and a change of
threads, which takes long where cores are scarce. Step times are the job's own. AGST is the stall averaged
over all workers, per version: the median over the updates.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import secrets
import statistics
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import msgspec  # noqa: E402  # needs the path

from benchmarks.harness.job import RolloutReport, Settings, TrainerReport, run_job  # noqa: E402
from benchmarks.harness.model import LAYER_HALF_NBYTES  # noqa: E402
from benchmarks.harness.rollout import run_rollout  # noqa: E402
from benchmarks.harness.trainer import run_trainer  # noqa: E402
from benchmarks.links.hosts import Host, open_hosts, why_not  # noqa: E402
from benchmarks.links.jobs import Placed, measure_links  # noqa: E402
from benchmarks.modes import per_version, slowest, slowest_copies, staleness  # noqa: E402
from wbridge.cli.measure import measure_copies  # noqa: E402
from wbridge.config import Config  # noqa: E402
from wbridge.plan.advise import MODES, Prediction, Speeds, Steps, predict  # noqa: E402
from wbridge.plan.loads import Load, even_load  # noqa: E402

LINKS = {"400mbit": 400.0, "1gbit": 1000.0}
"""Rates in Mbit/s."""
STEP_S = 0.3
"""Of an engine: so long that the other one's copies end before its own begin, as in the modes benchmark."""
NUM_TRAINERS = NUM_ENGINES = ENGINE_WORKERS = 2

Row = dict[str, object]


def main() -> None:
    options = parse_arguments()
    if reason := why_not():
        raise SystemExit(f"this benchmark cannot run here: {reason}")
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    os.environ["WBRIDGE_SECRET"] = secrets.token_hex(16)
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    rows: list[Row] = []
    for link in options.link or LINKS:
        names = [f"trainer-{k}" for k in range(NUM_TRAINERS)] + [f"engine-{k}" for k in range(NUM_ENGINES)]
        for mode in options.mode or MODES:
            with open_hosts(names, mbit=LINKS[link]) as hosts:
                speeds = measure_speeds(hosts, options.layers * LAYER_HALF_NBYTES)
                settings = Settings(mode, options.layers, options.updates, step_s=STEP_S, settle_s=4 * STEP_S)
                found = compare(settings, hosts, speeds)
            rows += [row(f"{mode}-{link}", metric, value) for metric, value in found.items()]
            for told in rows[-len(found) :]:
                print(f"{told['case']:24} {told['metric']:28} {told['value']:>12} {told['unit']}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--mode", choices=list(MODES), action="append", help="only these modes")
    parser.add_argument("--link", choices=list(LINKS), action="append", help="only these links")
    parser.add_argument(
        "--layers", type=int, default=8, help="of the model, 34 MB each: few make all copies short"
    )
    parser.add_argument("--updates", type=int, default=10, help="measured updates per case")
    return parser.parse_args()


def row(case: str, metric: str, value: float) -> Row:
    units = {"ms": "ms", "s": "s", "versions": "versions", "measured": "ratio"}
    unit = "GB/s" if metric.endswith("gb_s") else units[metric.rpartition("_")[2]]
    told = {"benchmark": "advise", "case": case, "system": "wbridge", "metric": metric}
    return told | {"value": round(value, 5), "unit": unit}


def measure_speeds(hosts: Mapping[str, Host], shard_nbytes: int) -> Speeds:
    copies = measure_copies("cpu", nbytes=shard_nbytes, num_workers=ENGINE_WORKERS)
    pairs = [(hosts[f"trainer-{k}"], hosts[f"engine-{k}"]) for k in range(NUM_TRAINERS)]
    links = measure_links(pairs)
    return Speeds(
        **msgspec.structs.asdict(copies),
        link_gb_s=statistics.mean(link.link_gb_s for link in links),
        round_s=statistics.mean(link.round_s for link in links),
    )


def compare(settings: Settings, hosts: Mapping[str, Host], speeds: Speeds) -> dict[str, float]:
    trainer_hosts = tuple(hosts[f"trainer-{k}"] for k in range(NUM_TRAINERS))
    engine_hosts = tuple(hosts[f"engine-{k}"] for k in range(NUM_ENGINES))
    meeting = trainer_hosts[0].address
    reports = run_job(
        settings,
        Placed(run_trainer, trainer_hosts, 1, meeting),
        Placed(run_rollout, engine_hosts, ENGINE_WORKERS, meeting),
    )
    trainers = [report for report in reports if isinstance(report, TrainerReport)]
    rollouts = [report for report in reports if isinstance(report, RolloutReport)]
    if not all(report.is_whole for report in rollouts):
        raise SystemExit("the weights of a rollout are not its version's")
    agst_ms = 1e3 * statistics.median(per_version(trainers, rollouts)[0])
    job = load_of_job(settings)
    speeds = msgspec.structs.replace(
        speeds,
        snapshot_gb_s=gb_s(job.shard_nbytes, (copy.wall_s for told in trainers for copy in told.copies)),
        apply_gb_s=gb_s(job.ingress_nbytes, slowest_copies(rollouts)),  # an engine waits for all its workers
        change_s=statistics.mean(
            slowest((told.engine, version, time_s) for told in rollouts for version, time_s in told.changes)
        ),
    )
    told = predict(settings.mode, job, speeds, measured_steps(trainers, rollouts), Config())
    return {
        "agst_ms": agst_ms,
        "predicted_agst_ms": 1e3 * told.agst_s,
        "predicted_over_measured": 1e3 * told.agst_s / agst_ms,
        "staleness_versions": staleness(trainers, rollouts),
        "predicted_staleness_versions": told.staleness_versions,
        **stalls_ms(trainers, rollouts, told),
        **msgspec.structs.asdict(speeds),
    }


def gb_s(nbytes: int, times_s: Iterable[float]) -> float:
    return nbytes / statistics.median(times_s) / 1e9


def load_of_job(settings: Settings) -> Load:
    return even_load(
        model_nbytes=NUM_TRAINERS * settings.num_layers * LAYER_HALF_NBYTES,
        num_trainers=NUM_TRAINERS,
        num_engines=NUM_ENGINES,
        workers_per_engine=ENGINE_WORKERS,
        slot_nbytes=Config().slot_nbytes,
        trainers_per_host=1,
        engines_per_host=1,
    )


def measured_steps(trainers: list[TrainerReport], rollouts: list[RolloutReport]) -> Steps:
    """How long both sides compute, whatever else they do between two sends and between two polls."""
    sends = [cost for _, _, cost in trainers[0].sends]
    train_s = statistics.median(later.begin_s - earlier.end_s for earlier, later in itertools.pairwise(sends))
    ends = [end_s for end_s, _ in rollouts[0].steps]
    rollout_s = statistics.median(later - earlier for earlier, later in itertools.pairwise(ends))
    return Steps(train_s=train_s, rollout_s=rollout_s)


def stalls_ms(
    trainers: list[TrainerReport], rollouts: list[RolloutReport], told: Prediction
) -> dict[str, float]:
    """Where the AGST comes from."""
    sends = [cost.wall_s for report in trainers for _, _, cost in report.sends]
    polls = [asked_s + cost.wall_s for report in rollouts for _, asked_s, cost in report.polls]
    return {
        "trainer_stall_ms": 1e3 * statistics.median(sends),
        "predicted_trainer_stall_ms": 1e3 * told.trainer_stall_s,
        "rollout_stall_ms": 1e3 * statistics.median(polls),
        "predicted_rollout_stall_ms": 1e3 * told.rollout_stall_s,
    }


if __name__ == "__main__":
    main()
