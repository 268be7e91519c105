"""Measure updates between hosts whose links have a limited rate, beside what one would use instead.

    python -m benchmarks lab --json PATH [--hosts N] [--mbit RATE]        (as root, on Linux, with iproute2)

Hosts are network namespaces, joined by a bridge; the link of each is limited in both directions by a token
bucket. Trainers share a host and hold a model in parts; each other host has one engine or more, with a
replica each. Workers are real processes: UCX over TCP between hosts, shared memory inside one. All systems
keep the same workload up to date, on fresh hosts each, and every byte is compared after every update.

`egress_copies` is what the trainers' host sends, in copies of the model, and `ingress_over_need_max` what a
rollout host receives over what it needs, each element once; both from the kernel's counters of all interfaces
of a host, less 66 bytes of headers for each packet; the largest of all updates. `time_over_bound` is the
median time of an update over what the busiest link would take at least, if trainers send one copy.
`wbridge-direct`: the same without relays. `gloo-broadcast`: trainers gather, the first broadcasts the whole
model to all rollouts. `independent-fetch`: every rollout gets its part from the trainers, over plain sockets.
Ratios are ours over theirs. `sim_over_lab` is what the simulator says, from the speeds of one idle link, over
what was measured. A row is not valid if the lab's processes took 60 % of the cores or more.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import wbridge  # noqa: E402  # needs the path
from benchmarks.lab.fleet import Fleet, layers_for  # noqa: E402
from benchmarks.lab.measure import MIN_BURST_NBYTES, Result, System, measure  # noqa: E402
from benchmarks.lab.predict import predict  # noqa: E402
from benchmarks.lab.rows import DIRECT, FETCH, GLOO, OURS, SYSTEMS, Row, rows_of, verdicts  # noqa: E402
from benchmarks.links.hosts import open_hosts, why_not  # noqa: E402
from benchmarks.links.jobs import measure_links  # noqa: E402
from benchmarks.systems.launch import WorkerFailed  # noqa: E402
from wbridge.cli.measure import LinkSpeed  # noqa: E402
from wbridge.config import Config  # noqa: E402

MIN_PAYLOAD_S = 8.0
QUEUED_MBIT = 1000.0
"""More than lies in front of a sign: slots and the kernel's buffers, of all connections of a host."""
DISTRIBUTIONS = ("torch", "ucxx-cu12", "libucx-cu12")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "UCX_WARN_UNUSED_ENV_VARS": "n"}


def main() -> int:
    options = parse_arguments()
    if reason := why_not():
        raise SystemExit(f"the lab cannot run here: {reason}")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that what was begun is ended
    os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()})
    os.environ["WBRIDGE_SECRET"] = secrets.token_hex(16)
    num_layers = options.layers or layers_for(MIN_PAYLOAD_S, options.mbit, options.hidden)
    rows = describe(options)
    link = None
    if options.simulate:
        link = measure_link(options.mbit)
        rows += link_rows(link, options.mbit)
    failed = False
    for num_hosts in options.hosts or (2, 3, 4):
        fleet = Fleet(
            num_hosts,
            num_layers,
            hidden=options.hidden,
            num_trainers=options.trainers,
            engines_per_host=options.engines_per_host,
            tensor_parallel=options.tensor_parallel,
        )
        results = [measured(system, fleet, options, link) for system in systems(options)]
        failed = failed or any(result.why_not for result in results)
        found = rows_of(results, options.mbit)
        print(*map(line_of, found), sep="\n", flush=True)
        rows += found
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(*verdicts(rows), sep="\n")
    return 1 if failed else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks lab",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, help="write the rows there, after each number of hosts")
    parser.add_argument("--hosts", type=int, action="append", help="rollout hosts; default 2, 3 and 4")
    parser.add_argument("--mbit", type=float, default=100.0, help="rate of every link, in each direction")
    parser.add_argument("--updates", type=int, default=3, help="of wbridge that count, after one more")
    parser.add_argument("--rival-updates", type=int, default=1, help="the same of each other system")
    parser.add_argument("--only", action="append", choices=SYSTEMS, help="only these systems")
    parser.add_argument(
        "--no-simulation", dest="simulate", action="store_false", help="neither measure a link nor simulate"
    )
    parser.add_argument("--trainers", type=int, default=2, help="workers on the trainers' host")
    parser.add_argument("--engines-per-host", type=int, default=1, help="replicas on each rollout host")
    parser.add_argument("--tensor-parallel", type=int, default=2, help="workers of each engine")
    parser.add_argument("--mode", default="sync", help="of wbridge")
    parser.add_argument("--slot-mb", type=float, default=0.5, help="of wbridge: groups are as large")
    parser.add_argument("--num-slots", type=int, default=0, help="of wbridge; 0: as many as it takes itself")
    parser.add_argument("--relay-patience-s", type=float, help="of wbridge; default: by the rate")
    parser.add_argument(
        "--layers", type=int, help="of the model, 31 MB each; default: 8 seconds at the rate of a link"
    )
    parser.add_argument("--hidden", type=int, default=1024, help="size of the model's layers")
    return parser.parse_args()


def systems(options: argparse.Namespace) -> list[System]:
    ours = {
        "mode": options.mode,
        "slot_nbytes": str(int(options.slot_mb * 2**20)),
        "num_slots": str(options.num_slots),
        "copy_threads": "1",
        "relay_patience_s": str(patience_s(options)),
    }
    found = {
        OURS: System(OURS, "ours", ours),
        DIRECT: System(DIRECT, "ours", {**ours, "relays": "off"}),
        GLOO: System(GLOO, "gloo", {"broadcast": "1"}),
        FETCH: System(FETCH, "probes", {"socket": "1"}),
    }
    return [found[name] for name in dict.fromkeys(options.only or found)]


def patience_s(options: argparse.Namespace) -> float:
    """How long workers wait for a sign of each other, which on a slow link waits behind bytes."""
    return float(options.relay_patience_s or max(Config().relay_patience_s, QUEUED_MBIT / options.mbit))


def measured(system: System, fleet: Fleet, options: argparse.Namespace, link: LinkSpeed | None) -> Result:
    print(f"{time.strftime('%H:%M:%S')} hosts-{fleet.num_rollout_hosts} {system.name}", flush=True)
    num_updates = options.updates if system.name == OURS else options.rival_updates
    try:
        result = measure(system, fleet, mbit=options.mbit, num_updates=num_updates)
    except WorkerFailed as exc:
        print(exc, file=sys.stderr)
        return Result(system, fleet, why_not=str(exc).strip().splitlines()[-1])
    if link is None or system.module != "ours":
        return result
    return dataclasses.replace(result, predicted_s=predict(fleet, system.options, link))


def describe(options: argparse.Namespace) -> list[Row]:
    """The machine and what runs on it, as rows of text."""
    found = {
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "wbridge": _commit(),
        **{name: importlib.metadata.version(name) for name in DISTRIBUTIONS},
        "load": f"{os.getloadavg()[0]:.1f}",
        "command": " ".join(["python -m benchmarks lab", *sys.argv[1:]]),
        "rate_mbit": f"{options.mbit:g}",
        "burst_kib": str(MIN_BURST_NBYTES // 1024),
        "relay_patience_s": f"{patience_s(options):g}",
    }
    print(", ".join(f"{name} {value}" for name, value in found.items()), flush=True)
    return [
        {"benchmark": "lab", "case": "machine", "system": "", "metric": name, "value": value, "unit": ""}
        for name, value in found.items()
    ]


def measure_link(mbit: float) -> LinkSpeed:
    """What the package's own transport gets through an idle link, which is what a simulation starts from."""
    with open_hosts(["near", "far"], mbit=mbit, min_burst_nbytes=MIN_BURST_NBYTES) as hosts:
        (speed,) = measure_links([(hosts["near"], hosts["far"])])
    return speed


def link_rows(link: LinkSpeed, mbit: float) -> list[Row]:
    metrics = {
        "link_gb_s": (link.link_gb_s, "GB/s"),
        "link_over_rate": (link.link_gb_s * 8e3 / mbit, "ratio"),
        "round_us": (1e6 * link.round_s, "us"),
    }
    rows: list[Row] = [
        {"benchmark": "lab", "case": "link", "system": OURS, "metric": metric, "value": round(value, 6)}
        | {"unit": unit, "valid": True}
        for metric, (value, unit) in metrics.items()
    ]
    print(*map(line_of, rows), sep="\n", flush=True)
    return rows


def line_of(row: Row) -> str:
    value = "" if row["value"] is None else f"{row['value']:12.3f}"
    remark = row.get("reason", "")
    return f"{row['case']:10} {row['system']:18} {row['metric']:24} {value} {row['unit']} {remark}".rstrip()


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return f"{wbridge.__version__}, not from a repository"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    sys.exit(main())
