"""Measure updates beside what one would use instead, and beside a bare copy of the same bytes.

    python -m benchmarks peers --json PATH [--only SYSTEM] [--case CASE] [--updates N] [--rounds N]

Each system runs in a virtual environment of its own, made under `.nox/peers` when it is first needed, and in
processes of its own; one that cannot is a row with the reason. All share one harness, which compares every
byte in the rollout's own parameters after every update. Systems take turns: in each round, each is started,
makes a warm-up update and some that count, and ends. Figures are medians over all updates that count.

`ratio_to_memcpy` is an update's time as a multiple of one single-threaded libc memcpy of the bytes that must
land, between buffers of 1 GB that have their pages, timed in the first trainer right before and after it.
Where the two differ by more than a fifth, the update is discarded and counted. `one-copy` and `two-threads`
copy straight into mapped parameters, `raw-socket` is one TCP stream per pair: plain code, no products.
A chart is written beside the JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.systems.catalogue import (  # noqa: E402  # needs the path
    CASES,
    COUNTED,
    OURS,
    Entry,
    entries,
)
from benchmarks.systems.chart import chart_of  # noqa: E402
from benchmarks.systems.environments import Unavailable, python_of, versions_in  # noqa: E402
from benchmarks.systems.results import Result, rows_of, verdicts  # noqa: E402
from benchmarks.systems.scratch import open_scratch  # noqa: E402

UPDATES = {"tiny": 50, "idle": 1}
MIN_UPDATES = 5
LAST_CHARACTERS = 300


def main() -> None:
    options = parse_arguments()
    print(f"{platform.machine()}, {_processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    results: list[Result] = []
    begin_s = time.monotonic()
    for case in options.case or CASES:
        results += measure_case(case, options)
        rows = rows_of(results)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
            options.json.with_suffix(".svg").write_text(chart_of(rows))
    print(f"\n{(time.monotonic() - begin_s) / 60:.1f} minutes")
    print(*verdicts(rows_of(results)), sep="\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the rows there, and a chart beside it")
    parser.add_argument("--case", choices=CASES, action="append", help="only these cases")
    parser.add_argument("--only", action="append", help="only systems whose name begins with this")
    parser.add_argument(
        "--updates", type=int, help=f"that must count, of each system; default {MIN_UPDATES}, tiny 50"
    )
    parser.add_argument("--rounds", type=int, default=2, help="runs of each system, in turns")
    parser.add_argument(
        "--part", type=float, default=1.0, help="of the tensors, to try something; shares are no results"
    )
    parser.add_argument("--limit-s", type=float, default=math.inf, help="the longest that one run may take")
    parser.add_argument("--keep-noisy", action="store_true", help="discard nothing: for a busy machine")
    return parser.parse_args()


def measure_case(case: str, options: argparse.Namespace) -> list[Result]:
    chosen = [e for e in entries(case) if not options.only or e.name.startswith(tuple(options.only))]
    results = {entry.name: Result(case, entry.name, why_not=entry.why_not) for entry in chosen}
    num_updates = options.updates or UPDATES.get(case, MIN_UPDATES)
    if case == "idle":
        run_idle(chosen, results, options)
    else:
        run_in_turns(chosen, results, num_updates, options)
    if case in COUNTED and OURS in results and not results[OURS].why_not:
        entry = next(entry for entry in chosen if entry.name == OURS)
        counted = run_cell(entry.having(count_calls="1"), case, 1, options)
        results[OURS].calls = None if "error" in counted else counted
    report(list(results.values()), {entry.name: versions_of(entry) for entry in chosen})
    return list(results.values())


def run_in_turns(
    chosen: list[Entry], results: dict[str, Result], num_updates: int, options: argparse.Namespace
) -> None:
    num_rounds = min(options.rounds, num_updates)
    for round_index in range(num_rounds):
        share = num_updates * (round_index + 1) // num_rounds - num_updates * round_index // num_rounds
        for entry in chosen:
            if results[entry.name].why_not or (round_index and not entry.is_interleaved):
                continue
            now, case = time.strftime("%H:%M:%S"), results[entry.name].case
            print(f"{now} {case} round {round_index + 1} {entry.name}", flush=True)
            num_here = share if entry.is_interleaved else num_updates
            run_entry(results[entry.name], entry, num_here, options)


def run_idle(chosen: list[Entry], results: dict[str, Result], options: argparse.Namespace) -> None:
    """Ours alone, the others at once: each waits, and what is counted is of its own processes."""
    alone = [entry for entry in chosen if entry.name == OURS]
    others = [entry for entry in chosen if entry.name != OURS]
    for together in (alone, others):
        print(f"{time.strftime('%H:%M:%S')} idle {', '.join(entry.name for entry in together)}", flush=True)
        with ThreadPoolExecutor() as threads:
            waiting = [
                threads.submit(run_entry, results[entry.name], entry, 1, options) for entry in together
            ]
        for each in waiting:
            each.result()


def run_entry(result: Result, entry: Entry, num_updates: int, options: argparse.Namespace) -> None:
    """Add one run to a result, or why there is none."""
    try:
        cell = run_cell(entry, result.case, num_updates, options)
    except Unavailable as exc:
        result.why_not = str(exc)
        return
    if "error" in cell:
        result.why_not = str(cell["error"]).splitlines()[-1][:LAST_CHARACTERS]
    else:
        result.cells.append(cell)


def run_cell(entry: Entry, case: str, num_updates: int, options: argparse.Namespace) -> dict[str, Any]:
    """Start one system on one case and return what its process printed.

    Raises:
        Unavailable: it ended without a word, or did not end in time.
    """
    command = [str(python_of(entry.environment)), *entry.flags, "-m", "benchmarks.systems.cell"]
    command += ["--system", entry.module, "--case", case, "--updates", str(num_updates)]
    command += ["--part", str(options.part)]
    command += [word for name, value in entry.options.items() for word in ("--option", f"{name}={value}")]
    command += ["--keep-noisy"] if options.keep_noisy or case == "idle" else []
    paths = [str(ROOT), *([] if entry.environment else [str(ROOT / "src")])]
    variables = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    variables |= {"UCX_WARN_UNUSED_ENV_VARS": "n", "RAY_USAGE_STATS_ENABLED": "0", **entry.variables}
    limit_s = min(entry.limit_s, options.limit_s)
    with open_scratch() as scratch:
        process = subprocess.Popen(
            command,
            env=os.environ | variables | {"TMPDIR": str(scratch)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            printed, complaints = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise Unavailable(f"took more than {limit_s:.0f} s") from None
        finally:
            _end_all(process)
    found = [line for line in printed.splitlines() if line.startswith("{")]
    if not found:
        last = complaints.strip().splitlines() or [f"exit code {process.returncode}"]
        raise Unavailable(last[-1][:LAST_CHARACTERS])
    cell: dict[str, Any] = json.loads(found[-1])
    return cell


def versions_of(entry: Entry) -> str:
    return " ".join(f"{name}={version}" for name, version in versions_in(entry.environment).items())


def report(results: list[Result], versions: dict[str, str]) -> None:
    for row in rows_of(results):
        value = "" if row["value"] is None else f"{row['value']:12.3f}"
        unit = row.get("reason", row["unit"])
        print(f"{row['case']:9} {row['system']:19} {row['metric']:30} {value} {unit}")
    for result in results:
        if result.calls:
            for name, count in result.calls["most_called"]:
                print(f"{result.case:9} {result.system:19} {count:8} calls of {name}")
    for system, named in versions.items():
        print(f"{system:19} {named or 'this package'}", flush=True)


def _end_all(process: subprocess.Popen[str]) -> None:
    """End what the run has started, too."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown processor"


if __name__ == "__main__":
    main()
