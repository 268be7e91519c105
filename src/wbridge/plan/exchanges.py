"""exchanges: which rollouts pass what they get on to each other, if that lowers the load.

Cells are the elements that the same rollouts need, whatever their layouts, so all that goes to one set of
rollouts is one exchange of theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from wbridge.plan.balance import SLICE_NBYTES, Balance, Workers, flows_of
from wbridge.plan.cells import Cell
from wbridge.plan.classes import Members
from wbridge.plan.receivers import ANYWHERE, Rollouts, Tables
from wbridge.plan.topology import Links, Topology, find_links, with_all_hosts
from wbridge.plan.types import PlannedExchange

SHARES: Final = 1_000_000
"""Shares of a group's members sum to about this; one more is nothing, though there be thousands."""

GROUPS_PER_MEMBER: Final = 32
LEAST_GROUPS: Final = 128
"""A version that is passed on has so many groups, so that the hops of one overlap with those of others."""

SLACK: Final = 1.001
"""Relays may load the busiest link by this much more, since they load all links together less."""

Cells = Sequence[tuple[int, Cell]]
"""With the number of tensors of each."""


def find_exchanges(
    cells: Cells, members: Members, rollouts: Rollouts, hosts: Sequence[str], topology: Topology
) -> tuple[PlannedExchange, ...]:
    """Return the exchanges of a plan; no host with trainers takes part in one."""
    links = find_links(members.workers, hosts, with_all_hosts(topology, hosts))
    needed: dict[Tables, float] = {}
    near: dict[Workers, float] = {}
    for num_tensors, cell in cells:
        for host, tables in rollouts.needing(cell.needed).items():
            if host == ANYWHERE:
                needed[tables] = needed.get(tables, 0.0) + num_tensors * cell.nbytes
                continue
            for k in rollouts.of_stream((tables, host)):
                near[k,] = near.get((k,), 0.0) + num_tensors * cell.nbytes
    sharing = {tables: rollouts.of_stream((tables, ANYWHERE)) for tables in sorted(needed)}
    if all(len(own) == 1 for own in sharing.values()):
        return ()
    passing = _Passing(needed, sharing, hosts, links)
    exchanges = passing.planned([tables for tables, own in sharing.items() if len(own) > 1])
    direct = dict(near)
    for tables, own in sharing.items():
        for k in own:
            direct[k,] = direct.get((k,), 0.0) + needed[tables]
    sent = [Balance(cells, members, rollouts, hosts, links, own).flows for own in ((), exchanges)]
    direct_s = _busiest_s(links, [sent[0]], [flows_of(direct, links, ingress=True)])
    taken = [passing.taking, {k: [n] for k, n in near.items()}]
    relayed_s = _busiest_s(links, [sent[1], passing.leaving], taken)
    return exchanges if relayed_s <= direct_s * SLACK else ()


def group_nbytes(version_nbytes: int, num_members: int, slot_nbytes: int) -> int:
    """Return how large groups of `num_members` may be, each of which gets `version_nbytes` in all."""
    wanted = version_nbytes // max(LEAST_GROUPS, GROUPS_PER_MEMBER * num_members)
    return min(slot_nbytes, max(SLICE_NBYTES, wanted))


class _Passing:
    """How bytes that leave their entries and arrive at ports load links evenly."""

    def __init__(
        self,
        needed: Mapping[Tables, float],
        sharing: Mapping[Tables, Workers],
        hosts: Sequence[str],
        links: Links,
    ) -> None:
        self._needed, self._sharing, self._links = needed, sharing, links
        self._by_host = {tables: _by_host(hosts, own) for tables, own in sharing.items()}
        leaving: dict[Workers, float] = {}
        arriving: dict[Workers, float] = {}
        for tables, nbytes in needed.items():
            own = self._by_host[tables]
            if len(own) > 1:
                leaving[sharing[tables]] = nbytes * (len(own) - 1)
            for workers in own:
                arriving[workers] = arriving.get(workers, 0.0) + nbytes
        self.leaving = flows_of(leaving, links)
        self.taking = flows_of(arriving, links, ingress=True)

    def planned(self, exchanged: Iterable[Tables]) -> tuple[PlannedExchange, ...]:
        """Return the exchanges of these, in their order.

        Whoever has the largest share of an exchange gets its first group, and a small one has no other. So of
        those with the same share one has a little more: in each exchange another one.
        """
        found: dict[Tables, PlannedExchange] = {}
        num_first = [0] * len(self._links.nics)
        for tables in sorted(exchanged, key=lambda tables: (-self._needed[tables], tables)):
            members = self._sharing[tables]
            nics = [self._links.of_worker[k] for k in members]
            port = {k: n for own in self._by_host[tables] for k, n in zip(own, self.taking[own], strict=True)}
            ports = [port[k] for k in members]
            entries = _shares(self.leaving.get(members, ports))
            first = min(range(len(nics)), key=lambda k: (-entries[k], num_first[nics[k]]))
            num_first[nics[first]] += 1
            entries[first] += 1
            found[tables] = PlannedExchange(tables, members, tuple(entries), tuple(_shares(ports)))
        return tuple(found[tables] for tables in sorted(found))


def _by_host(hosts: Sequence[str], workers: Workers) -> list[Workers]:
    found: dict[str, list[int]] = {}
    for worker in workers:
        found.setdefault(hosts[worker], []).append(worker)
    return [tuple(own) for _, own in sorted(found.items())]


def _shares(flows: Sequence[float]) -> list[int]:
    total = sum(flows)
    return [max(1, round(SHARES * flow / total)) if total else 1 for flow in flows]


Flows = Mapping[Workers, Sequence[float]]


def _busiest_s(links: Links, sent: Iterable[Flows], got: Iterable[Flows]) -> float:
    """Return the seconds of the busiest link."""
    egress, ingress = [0.0] * len(links.nics), [0.0] * len(links.nics)
    for loads, flows in ((egress, sent), (ingress, got)):
        for workers, flow in ((w, f) for own in flows for w, f in own.items()):
            for k, nbytes in zip(workers, flow, strict=True):
                loads[links.of_worker[k]] += nbytes
    times = [n / nic.egress_gb_s for n, nic in zip(egress, links.nics, strict=True)]
    return max(times + [n / nic.ingress_gb_s for n, nic in zip(ingress, links.nics, strict=True)])
