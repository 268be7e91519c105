"""`wbridge status`: who is in a job, which versions its engines have, whom it waits for."""

from __future__ import annotations

import argparse
import functools
import os

import anyio
import msgspec

from wbridge import settings
from wbridge.cli.table import print_table
from wbridge.config import Config
from wbridge.control.client import request_status
from wbridge.control.messages import StatusReply
from wbridge.control.rendezvous import parse_rendezvous


def run(options: argparse.Namespace) -> int:
    rendezvous = parse_rendezvous(options.rendezvous, os.environ)
    config = Config(connect_timeout_s=options.timeout_s)
    ask = functools.partial(request_status, rendezvous, config, secret=settings.load_secret(os.environ))
    reply = anyio.run(ask)
    if options.json:
        print(msgspec.json.encode(reply).decode())
    else:
        _show(reply)
    return 0


def _show(reply: StatusReply) -> None:
    print(f"epoch {reply.epoch or 'none yet'}, {reply.phase}, newest version: {_or_none(reply.announced)}")
    print(f"waiting for: {', '.join(reply.waiting_for) or 'nobody'}\n")
    members = ((m.worker, m.remote, "joined" if m.joined else "connecting") for m in reply.members)
    print_table(("worker", "address", "state"), members)
    print()
    engines = (
        (e.engine, "live" if e.live else "lost", "tainted" if e.tainted else _or_none(e.version), e.lag)
        for e in reply.engines
    )
    print_table(("engine", "state", "version", "lag"), engines)


def _or_none(value: int | None) -> str:
    return "none" if value is None else str(value)
