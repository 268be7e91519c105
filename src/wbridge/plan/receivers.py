"""receivers: which rollouts get the same bytes from the same writers, so that one answer serves them all."""

from __future__ import annotations

from collections.abc import Sequence

from wbridge.ids import WorkerId
from wbridge.plan.types import Place

ANYWHERE = ""
"""Hosts without trainers, to which every owner is equally near."""

Tables = tuple[int, ...]
"""In ascending order."""

Stream = tuple[Tables, str]
"""What exactly the rollouts with these tables need: on one host if that has trainers, else `ANYWHERE`."""


class Rollouts:
    """The rollouts of a fleet by table and host; hosts without trainers count as one."""

    def __init__(self, workers: Sequence[WorkerId], table_of: Sequence[int], hosts: Sequence[str]) -> None:
        near = {host for host, worker in zip(hosts, workers, strict=True) if worker.role == "trainer"}
        self._found: dict[tuple[int, str], list[int]] = {}
        self._where: dict[int, tuple[int, str]] = {}
        self._needing: dict[tuple[Place, ...], dict[str, Tables]] = {}
        for index, worker in enumerate(workers):
            if worker.role == "rollout":
                where = table_of[index], hosts[index] if hosts[index] in near else ANYWHERE
                self._where[index] = where
                self._found.setdefault(where, []).append(index)
        self._hosts: dict[int, set[str]] = {}
        for table, host in self._found:
            self._hosts.setdefault(table, set()).add(host)

    @property
    def kinds(self) -> dict[tuple[int, str], list[int]]:
        """Those with one table on one host, or on any without trainers: they get the same."""
        return self._found

    def kind_of(self, worker: int) -> tuple[int, str] | None:
        """Return its table and host; None: it is no rollout."""
        return self._where.get(worker)

    def of_stream(self, stream: Stream) -> tuple[int, ...]:
        """Return those that need it, in ascending order."""
        tables, host = stream
        return tuple(sorted(k for table in tables for k in self._found.get((table, host), ())))

    def needing(self, places: tuple[Place, ...]) -> dict[str, Tables]:
        """Return by host the tables that have one of these rows there."""
        if places not in self._needing:
            found: dict[str, set[int]] = {}
            for table, _ in places:
                for host in self._hosts.get(table, ()):
                    found.setdefault(host, set()).add(table)
            self._needing[places] = {host: tuple(sorted(own)) for host, own in sorted(found.items())}
        return self._needing[places]
