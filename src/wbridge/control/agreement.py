"""Job-wide settings: all use the coordinator's values, and a worker that insists on others is refused."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from wbridge.config import JOB_WIDE, Config
from wbridge.control.messages import Value
from wbridge.errors import ConfigError

Explicit = dict[str, tuple[Value, str]]
"""Settings that a user set, each with its origin."""


def job_values(config: Config) -> dict[str, Value]:
    """Return the job-wide settings as they travel in `Welcome`."""
    values = msgspec.to_builtins(config)
    return {name: values[name] for name in JOB_WIDE}


def adopt(config: Config, job: Mapping[str, Value]) -> Config:
    """Return `config` with the coordinator's job-wide values.

    Raises:
        ConfigError: a value makes no sense here.
    """
    values: dict[str, object] = msgspec.to_builtins(config) | dict(job)
    try:
        return msgspec.convert(values, Config)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"the coordinator's settings are not valid here: {exc}") from exc


def explicit_settings(config: Config, origins: Mapping[str, str]) -> Explicit:
    """Return the job-wide settings that were set, not defaulted, as they travel in `Hello`."""
    values = msgspec.to_builtins(config)
    return {
        name: (values[name], origins[name]) for name in JOB_WIDE if origins.get(name, "default") != "default"
    }


def check_pins(worker: object, explicit: Explicit, values: Mapping[str, Value]) -> None:
    """Check settings that a running job is to change against those that a worker has set for itself.

    Raises:
        ConfigError: the worker insists on another value; the message names it and its origin.
    """
    for name, value in sorted(values.items()):
        pinned, origin = explicit.get(name, (value, ""))
        if pinned != value:
            raise ConfigError(
                f"{worker} sets {name} = {pinned!r} ({origin}), so the job cannot change it to {value!r};"
                " leave it out there, and the worker follows the job"
            )


def check_agreement(worker: object, explicit: Explicit, config: Config, origins: Mapping[str, str]) -> None:
    """Compare what a worker set with what the job uses.

    Raises:
        ConfigError: they differ; the message names setting, both values and both origins.
    """
    ours = job_values(config)
    for name, (value, origin) in sorted(explicit.items()):
        if name in ours and value != ours[name]:
            raise ConfigError(
                f"{worker} sets {name} = {value!r} ({origin}), but the job uses {ours[name]!r}"
                f" ({origins.get(name, 'default')} of the coordinator); set it in one place only"
            )
