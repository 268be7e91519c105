"""Time planning for fleets of up to a thousand GPUs, and compare the plans with the lower bound.

    python -m benchmarks planner --json PATH [--only CASE] [--reference DIR]

No weights: tables of what workers hold are made from a model's config and a parallelism, half of the GPUs
trainers on hosts of their own. `plan_s` is `plan_tables`, in CPU seconds, the best of three; `write_out_s` is
what the slower of a trainer and a rollout worker then does for itself. Each case runs in a process of its
own, whose largest resident set is the peak. Hosts have eight NICs of 50 GB/s. `load_over_bound` is the
busiest link over the least that any plan needs, and `egress_copies` what trainers send, both of the plan as
it is executed: its groups and hops, written out one by one, when all engines take a version together.

`--reference DIR` names the folder with `planner_bench.py`, which times the planner of the published PyPI
package `wbridge` (another project) on the same layouts, in a virtual environment made for it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import math
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.harness.planning import KIMI, QWEN, cases, measure  # noqa: E402  # needs the path
from benchmarks.harness.reference import PACKAGES  # noqa: E402

REFERENCE_TIMEOUT_S = 900
LARGEST_EXPONENT, LARGEST_GROWTH = 1.3, 2.0

Row = dict[str, object]


def main() -> None:
    options = parse_arguments()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    rows: list[Row] = []
    seconds: dict[str, float] = {}
    for name in cases():
        if options.only and name not in options.only:
            continue
        found = measured_alone(name)
        seconds[name] = found["plan_s"]
        rows += [row(name, metric, value) for metric, value in found.items()]
        print(f"{name:44}" + "".join(f" {metric} {value:.4g}" for metric, value in found.items()), flush=True)
    for name, metric, value in summaries(seconds):
        rows.append(row(name, metric, value))
        print(f"{name:44} {metric} {value:.3f}")
    if options.reference:
        for name, plan_s in measure_reference(options.reference).items():
            rows.append({**row(name, "plan_s", plan_s), "system": "reference"})
            print(f"{name:44} reference plan_s {plan_s:.4g}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if missed := [text for told in rows if (text := missing(told))]:
        raise SystemExit("\n".join(missed))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--only", action="append", help="only these cases")
    parser.add_argument("--reference", type=Path, help="also run `planner_bench.py` from there")
    return parser.parse_args()


def measured_alone(case: str) -> dict[str, float]:
    """Measure in a new process, so that its peak memory is that of this case."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(measure, case).result()


def summaries(seconds: dict[str, float]) -> list[tuple[str, str, float]]:
    """Fit time against ranks from 256 to 1024, and compare ten times the layers with once."""
    found: list[tuple[str, str, float]] = []
    points = [
        (math.log(ranks), math.log(seconds[f"{QWEN}-{ranks}"]))
        for ranks in (256, 512, 1024)
        if f"{QWEN}-{ranks}" in seconds
    ]
    if len(points) > 1:
        mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
        slope = sum((x - mean_x) * (y - mean_y) for x, y in points)
        found.append((QWEN, "growth_exponent", slope / sum((x - mean_x) ** 2 for x, _ in points)))
    long = seconds.get(f"{QWEN}-256-ten-times-the-layers")
    if long is not None and f"{QWEN}-256" in seconds:
        found.append((QWEN, "ten_times_the_layers", long / seconds[f"{QWEN}-256"]))
    return found


def row(case: str, metric: str, value: float) -> Row:
    unit = {"_s": "s", "mb": "MB", "ms": "ms"}.get(metric[-2:], "")
    return {"benchmark": "planner", "case": case, "metric": metric, "value": round(value, 6), "unit": unit}


def missing(told: Row) -> str:
    """Return by how much a row misses what it promises, or nothing."""
    metric, value = str(told["metric"]), float(str(told["value"]))
    limits = {
        "plan_s": {f"{QWEN}-256": 2.0, f"{KIMI}-512": 10.0}.get(str(told["case"]), math.inf),
        "growth_exponent": LARGEST_EXPONENT,
        "ten_times_the_layers": LARGEST_GROWTH,
        "egress_copies": 1.01,
        "load_over_bound": 1.10 if any(word in str(told["case"]) for word in ("mixed", "and")) else 1.02,
    }
    limit = limits.get(metric, math.inf) if "system" not in told else math.inf
    return f"{told['case']}: {metric} {value} is more than {limit}" if value > limit else ""


def measure_reference(scripts: Path) -> dict[str, float]:
    """Return how long each rank of the published package plans; what takes too long is left out."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        venv.create(directory, with_pip=True)
        python = f"{directory}/bin/python"
        if subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES], check=False).returncode:
            print(f"reference: {' and '.join(PACKAGES)} cannot be installed here")
            return {}
        alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        for ranks in (16, 64, 256):
            command = [python, str(scripts / "planner_bench.py"), "--ranks", str(ranks), "--arena", "0"]
            try:
                done = subprocess.run(
                    command,
                    capture_output=True,
                    text=True,
                    timeout=REFERENCE_TIMEOUT_S,
                    env=alone,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                print(f"reference: {ranks} ranks take more than {REFERENCE_TIMEOUT_S} s")
                break
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            if not lines:
                print(f"reference: {ranks} ranks fail: {done.stderr[-300:]}")
                continue
            told = json.loads(lines[-1])
            found[f"{QWEN}-{ranks}"] = told["plan_s"] + told["topo_s"]
    return found


if __name__ == "__main__":
    main()
