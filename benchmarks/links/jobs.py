"""Processes of the harness on hosts of their own."""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import anyio

from benchmarks.harness.job import PATIENCE_S, START_METHOD, Channels, Role, Settings
from benchmarks.links.hosts import Host
from wbridge.cli.measure import LinkSpeed, measure_link, serve_link
from wbridge.config import Config

PORT = 7717
MEASURE_S = 2.0


@dataclass(frozen=True)
class Placed:
    """A role whose processes live on `hosts`, `workers_per_host` on each, and meet at `address`.

    The job's secret is in WBRIDGE_SECRET.
    """

    role: Role
    hosts: tuple[Host, ...]
    workers_per_host: int
    address: str

    def __call__(self, number: int, settings: Settings, channels: Channels) -> None:
        self.hosts[number // self.workers_per_host].enter()
        self.role(number, _Meeting(**settings.__dict__, address=self.address), channels)


@dataclass(frozen=True)
class _Meeting(Settings):
    """Settings of workers that find each other across hosts."""

    address: str = ""

    @property
    def adapter_arguments(self) -> dict[str, Any]:
        return super().adapter_arguments | {"rendezvous": f"tcp://{self.address}:{PORT}"}


def measure_links(pairs: Sequence[tuple[Host, Host]]) -> list[LinkSpeed]:
    """Measure from the first to the second of each pair as `wbridge advise --link` does, all at once."""
    context = multiprocessing.get_context(START_METHOD)
    together = context.Barrier(len(pairs))
    processes: list[Any] = []
    results: list[Any] = []
    try:
        for near, far in pairs:
            told: Any = context.Queue()
            processes.append(context.Process(target=_run_far_end, args=(far, told)))
            processes[-1].start()
            address = told.get(timeout=PATIENCE_S)
            processes.append(context.Process(target=_run_near_end, args=(near, address, together, told)))
            processes[-1].start()
            results.append(told)
        found: list[LinkSpeed] = [told.get(timeout=PATIENCE_S) for told in results]
        for process in processes:
            process.join(PATIENCE_S)
    finally:
        for process in processes:
            process.terminate()
            process.join()
    return found


def _run_far_end(host: Host, told: Any) -> None:
    host.enter()
    anyio.run(serve_link, Config(), told.put)


def _run_near_end(host: Host, address: str, together: Any, told: Any) -> None:
    host.enter()
    together.wait(PATIENCE_S)
    told.put(anyio.run(functools.partial(measure_link, Config(), address, duration_s=MEASURE_S)))
