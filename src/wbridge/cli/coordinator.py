"""`wbridge coordinator`: a coordinator in a process of its own, for jobs whose trainers come and go."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Mapping

import anyio

from wbridge import settings
from wbridge.cli.config import load
from wbridge.config import Config
from wbridge.control.coordinator import Coordinator
from wbridge.control.rendezvous import (
    Meeting,
    Rendezvous,
    bind_address,
    choose_secret,
    parse_rendezvous,
    publish,
    withdraw,
)


def run(options: argparse.Namespace) -> int:
    config, origins = load(options)
    rendezvous = parse_rendezvous(options.rendezvous, os.environ)
    secret = choose_secret(rendezvous, settings.load_secret(os.environ))
    anyio.run(_serve, config, origins, rendezvous, secret)
    return 0


async def _serve(config: Config, origins: Mapping[str, str], rendezvous: Rendezvous, secret: bytes) -> None:
    """Serve until interrupted or terminated, then say goodbye to the members."""
    host, port = bind_address(rendezvous)
    coordinator = Coordinator(config, secret=secret, origins=origins, host=host, port=port)
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with anyio.create_task_group() as tasks:
            meeting = Meeting(await tasks.start(coordinator.serve), secret)
            publish(rendezvous, meeting)
            print(f"listening on {meeting.address}; workers need coordinator=external", flush=True)
            try:
                async for _ in signals:
                    break
                await coordinator.leave()
            finally:
                withdraw(rendezvous, meeting)
