"""difference: what another plan changes, in bytes and transfers of each pair of workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from wbridge.plan.expand import Expansion
from wbridge.plan.routes import iter_hops
from wbridge.plan.traffic import find_traffic
from wbridge.plan.types import Plan


class PairChange(msgspec.Struct, frozen=True):
    """What one pair moves before and after."""

    writer: str
    receiver: str
    nbytes_before: int
    nbytes_after: int
    transfers_before: int
    transfers_after: int

    @property
    def change_nbytes(self) -> int:
        return self.nbytes_after - self.nbytes_before


class ReceiverChange(msgspec.Struct, frozen=True):
    """What one receiver gets in all; `moved` comes from another writer than before."""

    receiver: str
    added_nbytes: int
    removed_nbytes: int
    moved_nbytes: int


class Difference(msgspec.Struct, frozen=True):
    """From one plan to another."""

    before: str
    after: str
    joined: tuple[str, ...]
    left: tuple[str, ...]
    """Workers that only one of the plans has."""
    pairs: tuple[PairChange, ...]
    """Those that differ, largest change first."""
    num_equal_pairs: int
    receivers: tuple[ReceiverChange, ...]
    """Those that differ, largest change first."""
    added_nbytes: int
    removed_nbytes: int
    moved_nbytes: int
    transfers_before: int
    transfers_after: int


_Moves = dict[tuple[str, str], tuple[int, int]]


def compare(before: Plan, after: Plan) -> Difference:
    """Return what changes; workers are the same if their names are."""
    old, new = _moves(before), _moves(after)
    pairs = [
        PairChange(*pair, *_interleaved(old.get(pair, (0, 0)), new.get(pair, (0, 0))))
        for pair in sorted(old.keys() | new.keys())
    ]
    changed = [
        pair
        for pair in pairs
        if old.get((pair.writer, pair.receiver)) != new.get((pair.writer, pair.receiver))
    ]
    changed.sort(key=lambda pair: -abs(pair.change_nbytes))
    by_receiver: dict[str, list[PairChange]] = {}
    for pair in changed:
        by_receiver.setdefault(pair.receiver, []).append(pair)
    receivers = sorted(
        (_receiver(name, own) for name, own in sorted(by_receiver.items())),
        key=lambda r: -(r.added_nbytes + r.removed_nbytes + r.moved_nbytes),
    )
    names_before, names_after = {str(w) for w in before.workers}, {str(w) for w in after.workers}
    return Difference(
        before=before.fingerprint,
        after=after.fingerprint,
        joined=tuple(sorted(names_after - names_before)),
        left=tuple(sorted(names_before - names_after)),
        pairs=tuple(changed),
        num_equal_pairs=len(pairs) - len(changed),
        receivers=tuple(receivers),
        added_nbytes=sum(receiver.added_nbytes for receiver in receivers),
        removed_nbytes=sum(receiver.removed_nbytes for receiver in receivers),
        moved_nbytes=sum(receiver.moved_nbytes for receiver in receivers),
        transfers_before=sum(count for _, count in old.values()),
        transfers_after=sum(count for _, count in new.values()),
    )


def _moves(plan: Plan) -> _Moves:
    """Return bytes and transfers of each pair, if all engines take a version together."""
    expansion = Expansion(plan)
    counts: dict[tuple[int, int], int] = {}
    for writer, receiver, count in _transfers(plan, expansion):
        counts[writer, receiver] = counts.get((writer, receiver), 0) + count
    names = [str(worker) for worker in plan.workers]
    return {
        (names[writer], names[receiver]): (nbytes, counts.get((writer, receiver), 0))
        for (writer, receiver), nbytes in find_traffic(plan, expansion).pairs.items()
    }


def _transfers(plan: Plan, expansion: Expansion) -> Iterator[tuple[int, int, int]]:
    """Yield writer, receiver and number of transfers of each piece; who passes it on is its writer."""
    index = {worker: k for k, worker in enumerate(plan.workers)}
    engines = {worker.group for worker in plan.workers if worker.role == "rollout"}
    hops = iter_hops(expansion.exchanges(), engines)
    sources = {(index[hop.receiver], hop.received): index[hop.sender] for hop in hops}
    for members, groups in expansion.deliveries():
        table = plan.table_of[members[0]]
        for number, (intake, turn) in enumerate(groups):
            pieces = intake.transfers_in(turn, table)
            for k in members:
                for writer, count in pieces:
                    yield sources.get((k, number), writer), k, count


def _interleaved(before: tuple[int, int], after: tuple[int, int]) -> tuple[int, int, int, int]:
    return before[0], after[0], before[1], after[1]


def _receiver(name: str, pairs: Iterable[PairChange]) -> ReceiverChange:
    changes = [pair.change_nbytes for pair in pairs]
    more, less = sum(n for n in changes if n > 0), -sum(n for n in changes if n < 0)
    moved = min(more, less)
    return ReceiverChange(name, added_nbytes=more - moved, removed_nbytes=less - moved, moved_nbytes=moved)
