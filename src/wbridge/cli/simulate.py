"""`wbridge simulate`: how long a version would take over given links, by the real plan and protocol."""

from __future__ import annotations

import argparse

import msgspec

from wbridge.cli import job
from wbridge.cli.config import load
from wbridge.cli.job import load_source
from wbridge.cli.table import print_table
from wbridge.errors import ConfigError
from wbridge.plan.sizes import size_of, time_of
from wbridge.sim.baselines import Baseline, broadcast, independent_fetch
from wbridge.sim.simulate import Outcome, simulate
from wbridge.sim.speeds import Speeds

SPEEDS = {
    "latency_us": ("latency_s", "between hosts, one way"),
    "local_latency_us": ("local_latency_s", "inside a host"),
    "message_us": ("message_s", "what a put, a credit or a notification costs each of its ends"),
    "resolution_us": ("resolution_s", "flows that change within so long are taken together; 0: exact"),
    "local_gb_s": ("local_gb_s", "of each worker, to others on its host"),
    "copy_gb_s": ("copy_gb_s", "at which a worker gathers and scatters; 0: no cost"),
    "efficiency": ("efficiency", "the part of a NIC's bandwidth that payload gets"),
}


class Simulated(msgspec.Struct, frozen=True):
    """What `--json` prints."""

    speeds: Speeds
    ours: Outcome
    baselines: tuple[Baseline, ...]


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("source", help=job.HELP)
    job.add_arguments(command)
    speeds = command.add_argument_group("speeds, beside those of the NICs")
    defaults = {field.name: field.default for field in msgspec.structs.fields(Speeds)}
    for option, (field, what) in SPEEDS.items():
        default = defaults[field] * _scale(option)
        speeds.add_argument(
            f"--{option.replace('_', '-')}", type=float, metavar="N", help=f"{what}; default {default:g}"
        )
    command.add_argument(
        "--fold",
        choices=("none", "engines", "ranks"),
        default="engines",
        help="which equal workers are simulated once; default engines, which loses nothing",
    )
    command.add_argument(
        "--baselines", action="store_true", help="a broadcast and independent fetches as well"
    )
    command.add_argument("--json", action="store_true", help="print a JSON object")


def run(options: argparse.Namespace) -> int:
    config, _ = load(options)
    loaded = load_source(options.source, options, config)
    if not loaded.topology.nics:
        raise ConfigError(f"{options.source} says nothing of links: give --nics-per-host and --nic-gb-s")
    speeds = Speeds(
        **{
            field: value / _scale(option)
            for option, (field, _) in SPEEDS.items()
            if (value := getattr(options, option)) is not None
        }
    )
    plan, topology = loaded.plan, loaded.topology
    ours = simulate(plan, config, topology, speeds, fold=options.fold)
    others = (
        (broadcast(plan, topology, speeds), independent_fetch(plan, topology, speeds))
        if options.baselines
        else ()
    )
    if options.json:
        print(msgspec.json.encode(Simulated(speeds, ours, others)).decode())
    else:
        _show(ours, others)
    return 0


def _scale(option: str) -> float:
    return 1e6 if option.endswith("_us") else 1.0


def _show(ours: Outcome, others: tuple[Baseline, ...]) -> None:
    print(
        f"a version takes {time_of(ours.time_s)}, {ours.time_over_bound:.3f} of the lower bound"
        f" {time_of(ours.bound.relayed_s)}; bytes have landed after {time_of(ours.landed_s)}"
    )
    print(
        f"workers stall {time_of(ours.agst_s)} on average: trainers {time_of(ours.trainer_stall_s)}, rollouts"
        f" {time_of(ours.rollout_stall_s)}"
    )
    print(f"{ours.num_puts} puts; {ours.num_simulated} of {ours.num_workers} workers simulated\n")
    rows = sorted(ours.links, key=lambda link: -link.nbytes)[:10]
    print_table(("link", "direction", "carried"), ((r.link, r.direction, size_of(r.nbytes)) for r in rows))
    for other in others:
        print(
            f"\n{other.name}: {time_of(other.time_s)}, workers stall {time_of(other.agst_s)} on average,"
            f" {other.agst_s / ours.agst_s:.1f} times ours\n  {other.assumes}"
        )
