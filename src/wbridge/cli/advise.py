"""`wbridge advise`: what each mode would cost a job, and which one to choose."""

from __future__ import annotations

import argparse
import functools
import math
from pathlib import Path

import anyio
import msgspec

from wbridge.cli.config import load
from wbridge.cli.table import print_table
from wbridge.config import Config
from wbridge.errors import ConfigError
from wbridge.plan.advise import Advice, Prediction, Speeds, Steps, advise
from wbridge.plan.explain import Explanation
from wbridge.plan.loads import Load, even_load, load_of

COPIES = ("snapshot_gb_s", "apply_gb_s", "device_gb_s", "host_gb_s", "checksum_gb_s", "change_s")
LINK = ("link_gb_s", "round_s")
OTHERS = ("poll_s",)
NEEDED = ("snapshot_gb_s", "apply_gb_s", "device_gb_s", "host_gb_s", "link_gb_s")
LINK_DURATION_S = 2.0


class Report(msgspec.Struct, frozen=True):
    """What `--json` prints."""

    load: Load
    speeds: Speeds
    steps: Steps
    advice: Advice


def add_arguments(command: argparse.ArgumentParser) -> None:
    job = command.add_argument_group("the job")
    job.add_argument("--model-gb", type=float, help="one copy of the weights, evenly split")
    job.add_argument("--plan", type=Path, help="instead: an Explanation of the job's plan, as JSON")
    job.add_argument("--trainers", type=int, default=1, help="trainer workers")
    job.add_argument("--trainers-per-host", type=int, default=0, help="0: all on one")
    job.add_argument("--engines", type=int, help="default: the setting num_engines")
    job.add_argument("--engine-workers", type=int, default=1, help="workers of one engine")
    job.add_argument("--engines-per-host", type=int, default=1)
    job.add_argument("--train-step-s", type=float, help="a trainer's time between two versions")
    job.add_argument("--rollout-step-s", type=float, help="an engine's time between two polls")

    speeds = command.add_argument_group("speeds; what is given wins over what is measured")
    speeds.add_argument("--speeds", type=Path, help="a JSON file with some of the speeds below")
    for name in COPIES + LINK + OTHERS:
        what = next(field for field in msgspec.structs.fields(Speeds) if field.name == name)
        option = f"--{name.replace('_', '-')}"
        default = "" if what.required else f"default {what.default}"
        speeds.add_argument(option, type=float, metavar="N", help=default or None)
    speeds.add_argument("--measure", action="store_true", help="measure copies on this machine")
    speeds.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where parameters live")
    speeds.add_argument("--measure-mb", type=int, default=64, help="how much each worker copies")
    speeds.add_argument("--copying", type=int, default=1, help="workers that share a host and copy at once")
    speeds.add_argument("--link", metavar="ADDRESS", help="measure the link to a host that prints this with:")
    speeds.add_argument("--serve-link", action="store_true", help="be the other host of one --link")

    choice = command.add_argument_group("the choice")
    choice.add_argument("--ring-sizes", default="0", help="values of num_slots, as in 0,4,8; 0: as set")
    choice.add_argument("--max-staleness", type=float, default=math.inf, help="versions")
    choice.add_argument("--max-host-gb", type=float, default=math.inf, help="host memory of one worker")
    choice.add_argument("--json", action="store_true", help="print a JSON object")


def run(options: argparse.Namespace) -> int:
    config, _ = load(options)
    if options.serve_link:
        from wbridge.cli.measure import serve_link  # loads torch, which the model does without

        anyio.run(serve_link, config, lambda address: print(address, flush=True))
        return 0
    steps = _steps(options)
    job = _load(options, config)
    speeds = _speeds(options, config)
    advice = advise(
        job,
        speeds,
        steps,
        config,
        ring_sizes=_ring_sizes(options.ring_sizes),
        max_staleness=options.max_staleness,
        max_host_nbytes=options.max_host_gb * 1e9,
    )
    if options.json:
        print(msgspec.json.encode(Report(job, speeds, steps, advice)).decode())
    else:
        _show(speeds, advice)
    return 0


def _steps(options: argparse.Namespace) -> Steps:
    if options.train_step_s is None or options.rollout_step_s is None:
        raise ConfigError("--train-step-s and --rollout-step-s are needed: how long do both sides compute?")
    return Steps(train_s=options.train_step_s, rollout_s=options.rollout_step_s)


def _load(options: argparse.Namespace, config: Config) -> Load:
    if options.plan is not None:
        try:
            told = msgspec.json.decode(options.plan.read_bytes(), type=Explanation)
        except (OSError, msgspec.MsgspecError) as exc:
            raise ConfigError(f"--plan {options.plan}: {exc}; write it with wbridge.plan.explain") from exc
        return load_of(told, trainers_per_host=options.trainers_per_host or len(told.egress_nbytes))
    if options.model_gb is None:
        raise ConfigError("--model-gb or --plan is needed: how large is a version?")
    return even_load(
        model_nbytes=round(options.model_gb * 1e9),
        num_trainers=options.trainers,
        num_engines=config.num_engines if options.engines is None else options.engines,
        workers_per_engine=options.engine_workers,
        slot_nbytes=config.slot_nbytes,
        trainers_per_host=options.trainers_per_host,
        engines_per_host=options.engines_per_host,
    )


def _speeds(options: argparse.Namespace, config: Config) -> Speeds:
    """The measured speeds, below those of the file, below those of the command line."""
    found = _measured(options, config)
    if options.speeds is not None:
        try:
            found |= msgspec.json.decode(options.speeds.read_bytes(), type=dict[str, float])
        except (OSError, msgspec.MsgspecError) as exc:
            raise ConfigError(f"--speeds {options.speeds}: {exc}; write an object of numbers") from exc
    found |= {name: value for name in COPIES + LINK + OTHERS if (value := getattr(options, name)) is not None}
    if unknown := found.keys() - {*COPIES, *LINK, *OTHERS}:
        raise ConfigError(f"--speeds {options.speeds}: no such speed: {', '.join(sorted(unknown))}")
    if missing := [name for name in NEEDED if name not in found]:
        raise ConfigError(
            f"no value for {', '.join(missing)}: give --{missing[0].replace('_', '-')},"
            " or let --measure and --link ADDRESS find out"
        )
    return Speeds(**found)


def _measured(options: argparse.Namespace, config: Config) -> dict[str, float]:
    if not options.measure and options.link is None:
        return {}
    from wbridge.cli.measure import measure_copies, measure_link  # loads torch

    found: dict[str, float] = {}
    if options.measure:
        copies = measure_copies(
            options.device, nbytes=options.measure_mb * 10**6, num_workers=options.copying
        )
        found |= msgspec.structs.asdict(copies)
    if options.link is not None:
        ask = functools.partial(measure_link, config, options.link, duration_s=LINK_DURATION_S)
        found |= msgspec.structs.asdict(anyio.run(ask))
    return found


def _ring_sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(word) for word in text.split(","))
    except ValueError as exc:
        raise ConfigError(f"--ring-sizes {text}: write numbers, as in 0,4,8") from exc
    if any(size < 0 for size in sizes):
        raise ConfigError(f"--ring-sizes {text}: a ring has slots, or 0 for automatic")
    return sizes


def _show(speeds: Speeds, advice: Advice) -> None:
    print(", ".join(f"{name} {value:.4g}" for name, value in msgspec.structs.asdict(speeds).items()))
    print()
    header = ("mode", "slots", "AGST ms", "trainer ms", "rollout ms", "transfer ms", "versions behind")
    print_table(
        (*header, "applied", "train steps/s", "rollout steps/s", "computing", "host GB t/r"),
        (_row(prediction) for prediction in advice.predictions),
    )
    print(f"\n{advice.best.name}, {advice.best.num_slots} slots: {advice.reason}")


def _row(p: Prediction) -> tuple[object, ...]:
    times_ms = (f"{1e3 * s:.1f}" for s in (p.agst_s, p.trainer_stall_s, p.rollout_stall_s, p.transfer_s))
    return (
        p.name,
        p.num_slots,
        *times_ms,
        f"{p.staleness_versions:.2f}",
        f"{p.applied:.0%}",
        f"{p.train_steps_per_s:.3f}",
        f"{p.rollout_steps_per_s:.2f}",
        f"{p.busy:.1%}",
        f"{p.trainer_host_nbytes / 1e9:.2f}/{p.rollout_host_nbytes / 1e9:.2f}",
    )
