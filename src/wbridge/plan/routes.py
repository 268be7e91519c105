"""routes: from whom each member of an exchange gets each group, given who takes the version together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from wbridge.ids import WorkerId
from wbridge.plan.types import Exchange


class Hop(NamedTuple):
    """One group on its way from a member that has it to another one; each counts its groups for itself."""

    sender: WorkerId
    sent: int
    """Its index among the sender's groups."""
    receiver: WorkerId
    received: int
    """Its index among the receiver's groups."""


def iter_hops(exchanges: Iterable[Exchange], engines: Collection[str]) -> Iterator[Hop]:
    """Yield what the members whose engines are among `engines`, a serving set, pass on; the rest of what
    they get comes from trainers.

    Everybody who knows the plan and the serving set finds the same routes. They have no circles: a group
    comes from the trainers to a port on the entry's host, from there to the entry, if that is another one,
    from the entry to a port on each other host, and from ports to the others on theirs.
    """
    for exchange in exchanges:
        yield from _hops(exchange, engines)


def _hops(exchange: Exchange, engines: Collection[str]) -> Iterator[Hop]:
    members, numbers = exchange.members, exchange.numbers
    here = [k for k, member in enumerate(members) if member.group in engines]
    by_host: dict[str, list[int]] = {}
    for k in here:
        by_host.setdefault(exchange.hosts[k], []).append(k)
    entries = _Turns(exchange.entries, here)
    ports = {host: _Turns(exchange.ports, own) for host, own in by_host.items()}
    places = _places(exchange)
    near: dict[tuple[int, str], list[int]] = {}
    for group, nbytes in enumerate(exchange.sizes if len(here) > 1 else ()):
        entry = entries.take(nbytes)
        for host, own in by_host.items():
            if exchange.hosts[entry] == host:
                port = ports[host].take_or(entry, nbytes)
                outside = None
            else:
                if (entry, host) not in near:
                    near[entry, host] = [k for k in own if _overlap(places[entry], places[k])]
                port = ports[host].take(nbytes, near[entry, host])
                outside = entry
            for k in own:
                source = port if k != port else outside
                if source is not None:
                    yield Hop(members[source], numbers[source][group], members[k], numbers[k][group])


def partners_of(exchange: Exchange, worker: WorkerId) -> list[WorkerId]:
    """Return from and to whom a member may pass something on, whoever takes a version together.

    On its own host those are all members. Of the members of one engine on another host it meets those in the
    same place among them, so that the ranks of large engines have few connections.
    """
    places, members = _places(exchange), exchange.members
    k = members.index(worker)
    return [
        other
        for m, other in enumerate(members)
        if m != k and (exchange.hosts[m] == exchange.hosts[k] or _overlap(places[k], places[m]))
    ]


_Place = tuple[int, int]
"""Which of how many a worker is."""


def _places(exchange: Exchange) -> list[_Place]:
    """Return the place of each member among those of its engine on its host."""
    together: dict[tuple[str, str], list[int]] = {}
    for k, member in enumerate(exchange.members):
        together.setdefault((member.group, exchange.hosts[k]), []).append(k)
    found: list[_Place] = [(0, 1)] * len(exchange.members)
    for own in together.values():
        for turn, k in enumerate(own):
            found[k] = turn, len(own)
    return found


def _overlap(one: _Place, other: _Place) -> bool:
    """Whether the parts at these places have something in common, if each kind divides the same evenly."""
    (i, n), (j, m) = one, other
    return i * m < (j + 1) * n and j * n < (i + 1) * m


class _Turns:
    """Gives bytes to several in proportion to their shares, evenly mixed."""

    def __init__(self, shares: Sequence[int], among: Sequence[int]) -> None:
        self._shares = {k: max(1, shares[k]) for k in among}
        self._total = sum(self._shares.values())
        self._due = dict.fromkeys(among, 0)

    def take(self, nbytes: int, among: Sequence[int] = ()) -> int:
        """Return who is furthest behind its share, of all or of some."""
        self._owe(nbytes)
        return self._give(nbytes, max(among or self._due, key=lambda k: (self._due[k], -k)))

    def take_or(self, wish: int, nbytes: int) -> int:
        """Return `wish` unless it is ahead of its share by more than this: then who is furthest behind."""
        self._owe(nbytes)
        is_ahead = self._due[wish] < -self._total * nbytes
        return self._give(nbytes, max(self._due, key=lambda k: (self._due[k], -k)) if is_ahead else wish)

    def _owe(self, nbytes: int) -> None:
        for k, share in self._shares.items():
            self._due[k] += share * nbytes

    def _give(self, nbytes: int, chosen: int) -> int:
        self._due[chosen] -= self._total * nbytes
        return chosen
