"""`wbridge`: reads the arguments and hands over to one command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from wbridge import __version__
from wbridge.cli import advise, config, coordinator, doctor, plan, simulate, status
from wbridge.errors import WBridgeError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 well, 1 something is wrong, 2 wrong usage."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
        print(end="", flush=True)  # also where there is no standard output
    except WBridgeError as exc:
        print(f"wbridge: {exc}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever reads the output, `head` for instance, has seen enough
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # so that Python can end without an error
        return 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="wbridge", description="Moves the weights of trainers into rollout engines."
    )
    parser.add_argument("--version", action="version", version=f"wbridge {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    command = commands.add_parser("config", help="show each setting with its value, unit and origin")
    _add_settings(command)
    command.add_argument("--json", action="store_true", help="print a JSON list")
    command.set_defaults(run=config.run)

    command = commands.add_parser("coordinator", help="run a job's coordinator on its own, until interrupted")
    _add_rendezvous(command)
    _add_settings(command)
    command.set_defaults(run=coordinator.run)

    command = commands.add_parser("status", help="show a job's members, versions and whom it waits for")
    _add_rendezvous(command)
    command.add_argument("--timeout-s", type=float, default=10.0, help="how long to look for the coordinator")
    command.add_argument("--json", action="store_true", help="print a JSON object")
    command.set_defaults(run=status.run)

    command = commands.add_parser("advise", help="say what each mode would cost a job, and which to choose")
    advise.add_arguments(command)
    _add_settings(command)
    command.set_defaults(run=advise.run)

    command = commands.add_parser("plan", help="say what a plan moves, why, and what another would change")
    for verb in plan.add_commands(command):
        _add_settings(verb)

    command = commands.add_parser("simulate", help="say how long a version would take over given links")
    simulate.add_arguments(command)
    _add_settings(command)
    command.set_defaults(run=simulate.run)

    command = commands.add_parser(
        "doctor", help="say what works on this machine, and what to do about the rest"
    )
    command.set_defaults(run=doctor.run)
    return parser


def _add_rendezvous(command: argparse.ArgumentParser) -> None:
    command.add_argument("rendezvous", help="tcp://host:port, file:///absolute/path or env://")


def _add_settings(command: argparse.ArgumentParser) -> None:
    command.add_argument("--toml", type=Path, help="a file of settings")
    command.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="one setting; the value is written as in TOML, and text needs no quotes",
    )


if __name__ == "__main__":
    sys.exit(main())
