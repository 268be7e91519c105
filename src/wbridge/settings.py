"""Reads settings: arguments, then `WBRIDGE_*` variables, then a TOML file, then defaults. The only reader."""

from __future__ import annotations

import difflib
import enum
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, get_args, get_origin

import msgspec

from wbridge.config import Config
from wbridge.errors import ConfigError

PREFIX = "WBRIDGE_"
ENVIRONMENT_ONLY: Mapping[str, str] = {
    "WBRIDGE_CONFIG": "path of a TOML file with settings",
    "WBRIDGE_SECRET": "shared secret of the job's workers",
    "WBRIDGE_KERNEL_CACHE": "directory of compiled GPU kernels, `~/.cache/wbridge` if not set",
    "WBRIDGE_PORT": 'port of the coordinator with `rendezvous="env://"`',
}
"""Variables that are no setting of `Config`, and what they mean."""
DEFAULT_ORIGIN = "default"


class Row(msgspec.Struct, frozen=True):
    """One line of `wbridge config`."""

    name: str
    value: str
    unit: str
    origin: str


def load(
    arguments: Mapping[str, object], environ: Mapping[str, str], toml: Path | None = None
) -> tuple[Config, dict[str, str]]:
    """Return the settings, and for each one where its value comes from.

    `environ` is usually `os.environ`. Lists in it are separated by commas. `toml` is the file that
    `WBRIDGE_CONFIG` names, unless given.

    Raises:
        ConfigError: an unknown setting, a value of the wrong type or out of range, an unreadable file.
    """
    raw: dict[str, tuple[object, str]] = {}
    if toml is None and environ.get("WBRIDGE_CONFIG"):
        toml = Path(environ["WBRIDGE_CONFIG"])
    if toml is not None:
        raw |= {name: (value, str(toml)) for name, value in _read_toml(toml).items()}
    for variable, text in environ.items():
        if variable.startswith(PREFIX) and variable not in ENVIRONMENT_ONLY:
            raw[variable.removeprefix(PREFIX).lower()] = (text, variable)
    raw |= {name: (value, "argument") for name, value in arguments.items()}

    fields = {field.name: field for field in msgspec.structs.fields(Config)}
    values: dict[str, object] = {}
    for name, (value, origin) in raw.items():
        if name not in fields:
            raise ConfigError(_unknown(name, origin, fields))
        values[name] = _convert(name, value, origin, fields[name].type)
    try:
        config = msgspec.convert(values, Config)
    except msgspec.ValidationError as exc:
        raise _with_origins(exc, raw) from exc
    return config, {name: raw[name][1] if name in raw else DEFAULT_ORIGIN for name in fields}


def load_secret(environ: Mapping[str, str]) -> bytes:
    """Return the shared secret from `WBRIDGE_SECRET`, empty if there is none."""
    return environ.get("WBRIDGE_SECRET", "").encode()


def non_defaults(config: Config) -> dict[str, object]:
    """Return the settings whose values differ from the defaults: what the author of `config` asked for."""
    default = Config()
    return {
        name: getattr(config, name)
        for name in Config.__struct_fields__
        if getattr(config, name) != getattr(default, name)
    }


def describe(config: Config, origins: Mapping[str, str]) -> tuple[Row, ...]:
    """Return one row for each setting, in the order of `Config`."""
    return tuple(
        Row(name, _text(getattr(config, name)), _unit(name), origins.get(name, DEFAULT_ORIGIN))
        for name in Config.__struct_fields__
    )


def _read_toml(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise ConfigError(f"cannot read settings from {path}: {exc}") from exc


def _unknown(name: str, origin: str, known: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}?" if nearest else "`wbridge config` lists all settings"
    return f"there is no setting {name!r} ({origin}); {hint}"


def _convert(name: str, value: object, origin: str, kind: object) -> object:
    """Check one value; text from the environment is parsed, anything else must have the right type."""
    from_environment = origin.startswith(PREFIX)
    if from_environment and kind == tuple[str, ...]:
        value = [part.strip() for part in str(value).split(",") if part.strip()]
    try:
        return msgspec.to_builtins(
            msgspec.convert(msgspec.to_builtins(value), kind, strict=not from_environment)
        )
    except (msgspec.ValidationError, TypeError, ValueError) as exc:
        raise ConfigError(f"{name} = {value!r} ({origin}): {exc}{_accepted(name, kind)}") from exc


def _accepted(name: str, kind: object) -> str:
    """What a setting may be, as the end of an error."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return "; use one of " + ", ".join(member.value for member in kind)
    if get_origin(kind) is Literal:
        return "; use one of " + ", ".join(get_args(kind))
    return f"; the unit is {_unit(name)}" if _unit(name) else ""


def _with_origins(error: msgspec.ValidationError, raw: Mapping[str, tuple[object, str]]) -> ConfigError:
    """The range check names the setting; add where its value comes from."""
    name = str(error).partition(" ")[0]
    origin = f" ({raw[name][1]})" if name in raw else ""
    return ConfigError(f"{error}{origin}")


def _text(value: object) -> str:
    plain = msgspec.to_builtins(value)
    return ", ".join(plain) if isinstance(plain, tuple | list) else str(plain)


def _unit(name: str) -> str:
    if name.endswith("_s"):
        return "seconds"
    return "bytes" if name.endswith("_nbytes") else ""
