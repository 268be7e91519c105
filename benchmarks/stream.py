"""Send versions faster than a link carries them: how many arrive, and how often the trainers send each.

    python -m benchmarks stream --json PATH        (as root, on Linux, with iproute2)

Two trainers share a host, two engines of two tensor-parallel workers have one each: network namespaces whose
links are limited in both directions. The trainers send after every step of 0.2 s, which is a third of what
one copy of the model takes on their link, and never wait for anybody; the engines poll after every step of
0.05 s. So there is always a newer version for an engine that has applied one, and the two are never ready
in the same instant.

`copies_per_version` is what the trainers have put, in copies of the model, over the versions that an engine
has applied, on average. `versions_over_bound` is how many those are in a second, over how many copies of
the model the trainers' link could carry. `wbridge-direct`: the same without relays.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import secrets
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.harness.job import RolloutReport, Settings, TrainerReport, run_job  # noqa: E402  # needs the path
from benchmarks.harness.model import LAYER_HALF_NBYTES  # noqa: E402
from benchmarks.harness.rollout import run_rollout  # noqa: E402
from benchmarks.harness.trainer import run_trainer  # noqa: E402
from benchmarks.links.hosts import open_hosts, why_not  # noqa: E402
from benchmarks.links.jobs import Placed  # noqa: E402
from benchmarks.modes import staleness  # noqa: E402

MODES = ("sender_overlap", "async")
"""In the others the trainers wait for the engines."""
SYSTEMS = {"wbridge": "auto", "wbridge-direct": "off"}
"""With which `relays`."""
COPY_S = 0.6
"""Of the model, on the trainers' link."""
TRAIN_S, STEP_S = COPY_S / 3, COPY_S / 12
NUM_TRAINERS = NUM_ENGINES = ENGINE_WORKERS = 2
UNITS = {"copies_per_version": "copies", "versions_over_bound": "ratio", "versions": "versions"}

Row = dict[str, object]


def main() -> None:
    options = parse_arguments()
    if reason := why_not():
        raise SystemExit(f"this benchmark cannot run here: {reason}")
    os.environ["WBRIDGE_SECRET"] = secrets.token_hex(16)
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    rows: list[Row] = []
    for mode in options.mode or MODES:
        for system, relays in SYSTEMS.items():
            settings = Settings(
                mode,
                options.layers,
                num_updates=1,  # beside the one that warms up
                burst=options.sends,
                compute_s=TRAIN_S,
                step_s=STEP_S,
                config={"relays": relays},
            )
            for metric, value in measure(settings).items():
                unit = UNITS.get(metric, metric.rpartition("_")[2])
                told = {"benchmark": "stream", "case": mode, "system": system, "metric": metric}
                rows.append(told | {"value": round(value, 4), "unit": unit})
                print(f"{mode:16} {system:16} {metric:24} {value:10.3f} {unit}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--mode", choices=MODES, action="append", help="only these modes")
    parser.add_argument("--layers", type=int, default=1, help="of the model, 34 MB each")
    parser.add_argument("--sends", type=int, default=60, help="that are measured, after as many more")
    return parser.parse_args()


def measure(settings: Settings) -> dict[str, float]:
    model_nbytes = NUM_TRAINERS * settings.num_layers * LAYER_HALF_NBYTES
    names = ["trainers", *settings.engines]
    with open_hosts(names, mbit=8e-6 * model_nbytes / COPY_S) as hosts:
        meeting = hosts["trainers"].address
        reports = run_job(
            settings,
            Placed(run_trainer, (hosts["trainers"],), NUM_TRAINERS, meeting),
            Placed(run_rollout, tuple(hosts[name] for name in settings.engines), ENGINE_WORKERS, meeting),
        )
    trainers = [report for report in reports if isinstance(report, TrainerReport)]
    leaders = [report for report in reports if isinstance(report, RolloutReport) and report.rank == 0]
    if not all(report.is_whole for report in reports if isinstance(report, RolloutReport)):
        raise SystemExit("the weights of a rollout are not its version's")
    sends = [cost for report in trainers for _, _, cost in report.sends]
    begin_s, end_s = min(cost.begin_s for cost in sends), max(cost.end_s for cost in sends)
    arrived = [sum(begin_s <= cost.end_s <= end_s for _, _, cost in report.polls) for report in leaders]
    return {
        "copies_per_version": sum(report.put_nbytes for report in trainers)
        / model_nbytes
        / statistics.mean(len(report.polls) for report in leaders),
        "versions_over_bound": statistics.mean(arrived) * COPY_S / (end_s - begin_s),
        "versions": statistics.mean(arrived),
        "staleness_versions": staleness(trainers, leaders),
        "trainer_stall_ms": 1e3 * statistics.median(cost.wall_s for cost in sends),
        "trainer_stall_max_ms": 1e3 * max(cost.wall_s for cost in sends),
    }


if __name__ == "__main__":
    main()
