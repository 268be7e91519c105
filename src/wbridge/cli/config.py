"""`wbridge config`: each setting with its value, unit and origin."""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Iterable

import msgspec

from wbridge import settings
from wbridge.cli.table import print_table
from wbridge.config import Config
from wbridge.errors import ConfigError


def run(options: argparse.Namespace) -> int:
    rows = settings.describe(*load(options))
    if options.json:
        print(msgspec.json.encode(rows).decode())
    else:
        print_table(("setting", "value", "unit", "origin"), (msgspec.structs.astuple(row) for row in rows))
    return 0


def load(options: argparse.Namespace) -> tuple[Config, dict[str, str]]:
    """Return the settings that `--set`, the environment and `--toml` give, and their origins."""
    return settings.load(parse(options.settings), os.environ, options.toml)


def parse(assignments: Iterable[str]) -> dict[str, object]:
    """Read `NAME=VALUE` arguments; a value that is no TOML is text.

    Raises:
        ConfigError: there is no `=`.
    """
    values: dict[str, object] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--set {assignment}: write NAME=VALUE")
        try:
            values[name] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            values[name] = text
    return values
