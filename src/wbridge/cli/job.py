"""From what a command names (a saved plan, or a description of a job) to its plan and links."""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path

import msgspec

from wbridge.config import Config
from wbridge.control.planning import restored
from wbridge.errors import ConfigError, ProtocolError
from wbridge.plan.build import plan_tables
from wbridge.plan.describe import Job, links_of, model_of, named_model, read_group, read_job
from wbridge.plan.fleets import MODELS, Model
from wbridge.plan.topology import Topology
from wbridge.plan.types import Plan

HELP = (
    "a saved plan; a directory of cached plans, of which the newest counts; a TOML file that describes a job;"
    f" a model's config.json, or one of {', '.join(MODELS)}: then --trainers and --rollouts say the rest"
)
GROUP = "as 16,pp=2,tp=4,ep=8: that many workers, layers over pp, rows over tp, experts over ep"
SHARED = ("gpus_per_host", "nics_per_host", "nic_gb_s")


class Loaded(msgspec.Struct, frozen=True):
    """A plan, what is known of its links, and where it is from."""

    plan: Plan
    topology: Topology
    job: Job | None
    """None: it was saved."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    job = command.add_argument_group(
        "the job, if it is described and not saved; all but workers has a default"
    )
    job.add_argument("--trainers", metavar="GROUP", help=GROUP)
    job.add_argument(
        "--rollouts",
        metavar="GROUP",
        action="append",
        help="the same, or as 2x8,tp=8: two engines of 8; again for others",
    )
    job.add_argument("--gpus-per-host", type=int, metavar="N", help="default 8")
    links = command.add_argument_group("links between hosts, the same in both directions")
    links.add_argument(
        "--nics-per-host",
        type=int,
        metavar="N",
        help="default 8; 0, and of a saved plan: nothing is known of them",
    )
    links.add_argument("--nic-gb-s", type=float, metavar="N", help="default 50")


def load_source(source: str, options: argparse.Namespace, config: Config) -> Loaded:
    """Return the plan that `source` names, or make one.

    Raises:
        ConfigError: it is nothing of the kind, or its description does not hold; the field is named.
    """
    path = Path(source)
    if path.is_dir():
        path = _in_directory(path)
    if path.is_file() and path.suffix not in (".toml", ".json"):
        return _saved(path, options)
    described = {name: value for name in SHARED if (value := getattr(options, name)) is not None}
    if path.suffix == ".toml" and path.is_file():
        described = _toml(path) | described
    else:
        described["model"] = str(path) if path.is_file() else source
    for name, value in (("trainers", options.trainers), ("rollouts", options.rollouts)):
        if value is not None:
            described[name] = _groups(name, value)
    for name in ("trainers", "rollouts"):
        if name not in described:
            where = f"--{name} GROUP" if path.suffix != ".toml" else f"[{name}] to {source}"
            raise ConfigError(f"{source} says nothing of {name}; add {where}, {GROUP}")
    return planned(read_job(described, source), config, beside=path.parent)


def planned(job: Job, config: Config, *, beside: Path = Path()) -> Loaded:
    """Plan a job; a model's path may be relative to the file `beside` which it stands."""
    fleet = job.fleet(_model(job.model, beside))
    topology = job.topology(set(fleet.hosts.values()))
    return Loaded(plan_tables(fleet.tables, fleet.hosts, config, topology), topology, job)


def overridden(job: Job, *, trainers: str | None, rollouts: list[str] | None) -> Job:
    """Return the job with other workers."""
    if trainers is not None:
        job = msgspec.structs.replace(job, trainers=read_group(trainers, "--then-trainers"))
    if rollouts is not None:
        groups = tuple(read_group(text, "--then-rollouts") for text in rollouts)
        job = msgspec.structs.replace(job, rollouts=groups)
    return job


def _in_directory(path: Path) -> Path:
    if plans := sorted(path.glob("*.plan"), key=lambda p: (p.stat().st_mtime_ns, p.name)):
        return plans[-1]
    if (path / "config.json").is_file():
        return path / "config.json"
    raise ConfigError(
        f"{path}: no saved plan (*.plan) and no config.json in it; is this the job's cache_dir?"
    )


def _saved(path: Path, options: argparse.Namespace) -> Loaded:
    given = [
        f"--{n.replace('_', '-')}" for n in ("trainers", "rollouts", "gpus_per_host") if getattr(options, n)
    ]
    if given:
        raise ConfigError(
            f"{path} is a saved plan, so {given[0]} changes nothing; name a model or a description"
        )
    try:
        plan = restored(path.read_bytes())
    except ProtocolError as exc:
        raise ConfigError(f"{path}: {exc}") from exc
    nics = options.nics_per_host or 0
    rate = Job.__struct_defaults__[2] if options.nic_gb_s is None else options.nic_gb_s
    return Loaded(plan, links_of(set(plan.hosts), nics, rate), None)


def _toml(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path}: {exc}; write it as docs/how-to/plan.md shows") from exc


def _groups(name: str, value: str | list[str]) -> object:
    texts = [value] if isinstance(value, str) else value
    found = [msgspec.structs.asdict(read_group(text, f"--{name}")) for text in texts]
    return found[0] if name == "trainers" else found


def _model(name: str, beside: Path) -> Model:
    path = next((p for p in (Path(name), beside / name) if p.exists()), None)
    if path is None:
        return named_model(name)
    file = path / "config.json" if path.is_dir() else path
    try:
        config = msgspec.json.decode(file.read_bytes(), type=dict[str, object])
    except (OSError, msgspec.MsgspecError) as exc:
        raise ConfigError(f"model = {name}: {exc}; give a model's config.json") from exc
    return model_of(config, name)
