"""Plan, Group, Piece, Transfer: what goes from whom to whom, frozen and serialisable."""

from __future__ import annotations

import msgspec

from wbridge.errors import PlanError
from wbridge.ids import WorkerId
from wbridge.layout.region import Strided


class Transfer(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One strided block of a checkpoint tensor on its way from a source to a target parameter.

    All three views share the loops `extents`. `wire` counts wire elements from `slot_offset` (bytes
    from the start of the group's slot); a loop with wire stride 0 replicates at the target, and the
    sender skips it. The wire carries the narrower dtype of the pair.
    """

    tensor: str
    extents: tuple[int, ...]
    source_parameter: str
    source: Strided
    target_parameter: str
    target: Strided
    wire: Strided
    wire_dtype: str
    slot_offset: int


class Piece(msgspec.Struct, frozen=True):
    """The contiguous byte range of a group's slot that one writer fills with one put.

    `holders` lists further workers on lower stages that could write the same range, best first,
    ending in a trainer; it is empty when `writer` is the only one. (For relays.)
    """

    writer: WorkerId
    offset: int
    nbytes: int
    transfers: tuple[Transfer, ...]
    holders: tuple[WorkerId, ...] = ()


class Group(msgspec.Struct, frozen=True):
    """The regions that travel together through one slot of one receiver; all its pieces must land."""

    receiver: WorkerId
    index: int
    nbytes: int
    pieces: tuple[Piece, ...]
    stage: int = 1


class Plan(msgspec.Struct, frozen=True):
    """Who sends which region to whom: for each receiver, its groups in order (index 0..G-1)."""

    workers: tuple[WorkerId, ...]
    groups: tuple[Group, ...]
    fingerprint: str

    def groups_into(self, receiver: WorkerId) -> tuple[Group, ...]:
        return tuple(g for g in self.groups if g.receiver == receiver)

    def groups_from(self, writer: WorkerId) -> tuple[Group, ...]:
        return tuple(g for g in self.groups if any(p.writer == writer for p in g.pieces))


class Outgoing(msgspec.Struct, frozen=True):
    """One piece that a worker writes: `piece` is piece `piece_index` of group `group_index` of `receiver`."""

    receiver: WorkerId
    group_index: int
    piece_index: int
    piece: Piece


class WorkerPlan(msgspec.Struct, frozen=True):
    """What one worker needs of a plan: the groups it receives and the pieces it writes, in group order."""

    worker: WorkerId
    incoming: tuple[Group, ...]
    outgoing: tuple[Outgoing, ...]
    fingerprint: str


def slice_for(plan: Plan, worker: WorkerId) -> WorkerPlan:
    """Return the part of `plan` that concerns `worker`.

    Raises:
        PlanError: the plan does not know this worker.
    """
    if worker not in plan.workers:
        raise PlanError(f"{worker} is not in plan {plan.fingerprint[:12]}; plan again with its source map")
    outgoing = [
        Outgoing(receiver=group.receiver, group_index=group.index, piece_index=index, piece=piece)
        for group in plan.groups
        for index, piece in enumerate(group.pieces)
        if piece.writer == worker
    ]
    outgoing.sort(key=lambda o: (o.group_index, o.receiver, o.piece_index))
    return WorkerPlan(
        worker=worker,
        incoming=plan.groups_into(worker),
        outgoing=tuple(outgoing),
        fingerprint=plan.fingerprint,
    )
