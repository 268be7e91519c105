"""Topology: which workers share a host, and through which links hosts reach each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from wbridge.errors import PlanError
from wbridge.ids import WorkerId


class Nic(msgspec.Struct, frozen=True):
    """One link of a host to the others, by what it carries in each direction."""

    egress_gb_s: float
    ingress_gb_s: float

    def __post_init__(self) -> None:
        if self.egress_gb_s <= 0 or self.ingress_gb_s <= 0:
            raise PlanError(f"{self}: a bandwidth must be positive; leave links that are down out")


EVEN = Nic(1.0, 1.0)


class Topology(msgspec.Struct, frozen=True):
    """The NICs of each host. The workers of a host, in ascending order, are divided among them.

    Of a host that is not listed nothing is known: each of its trainers counts as a link of its own, its
    rollouts as one together, and all such links as equal.
    """

    nics: dict[str, tuple[Nic, ...]] = {}


def read_topology(entries: Iterable[str]) -> Topology:
    """Return what `Config.topology` says.

    Raises:
        PlanError: a number is none, or not positive.
    """
    nics: dict[str, tuple[Nic, ...]] = {}
    for entry in entries:
        host, _, listed = entry.rpartition("=")
        try:
            found = [[float(number) for number in nic.split("/")] for nic in listed.split("+")]
        except ValueError as exc:
            raise PlanError(f"topology has {entry!r}: {exc}; give GB/s such as 12.5") from exc
        nics[host.strip()] = tuple(Nic(each[0], each[-1]) for each in found)
    return Topology(nics)


def with_all_hosts(topology: Topology, hosts: Iterable[str]) -> Topology:
    """Return it with one NIC, all of them equal, for each host that it does not list."""
    return Topology(dict.fromkeys(hosts, (EVEN,)) | topology.nics)


class Links(msgspec.Struct, frozen=True):
    """All links of a fleet, and the one of each worker."""

    names: tuple[str, ...]
    nics: tuple[Nic, ...]
    of_worker: tuple[int, ...]


def find_links(workers: Sequence[WorkerId], hosts: Sequence[str], topology: Topology) -> Links:
    """Return the links of the workers' hosts; `hosts` names the host of each worker.

    Raises:
        PlanError: a host is listed without NICs.
    """
    on_host: dict[str, list[int]] = {}
    for index, host in enumerate(hosts):
        on_host.setdefault(host, []).append(index)
    found: dict[str, int] = {}
    nics: list[Nic] = []
    of_worker = [0] * len(workers)
    for host in sorted(on_host):
        own = on_host[host]
        known = topology.nics.get(host)
        if known is not None and not known:
            raise PlanError(f"host {host!r} has no NIC; list at least one, or leave the host out")
        for turn, index in enumerate(own):
            name, nic = (str(workers[index]) if workers[index].role == "trainer" else host), EVEN
            if known is not None:
                place = turn * len(known) // len(own)
                name, nic = f"{host}/nic{place}", known[place]
            if name not in found:
                found[name] = len(nics)
                nics.append(nic)
            of_worker[index] = found[name]
    return Links(tuple(found), tuple(nics), tuple(of_worker))


def hosts_of(workers: Sequence[WorkerId], hosts: Mapping[WorkerId, str]) -> tuple[str, ...]:
    """Return the host of each worker.

    Raises:
        PlanError: a worker has none.
    """
    if homeless := [worker for worker in workers if worker not in hosts]:
        raise PlanError(
            f"{homeless[0]} and {len(homeless) - 1} other workers have no host; pass one for each"
        )
    return tuple(hosts[worker] for worker in workers)
