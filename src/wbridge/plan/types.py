"""Plan, and Group, Piece, Transfer: what goes from whom to whom, frozen and serialisable."""

from __future__ import annotations

import msgspec

from wbridge.errors import PlanError
from wbridge.ids import WorkerId
from wbridge.layout.dtype import itemsize
from wbridge.layout.region import Region, Strided
from wbridge.plan.tables import Column, names_of

Place = tuple[int, int]
"""A row of a table, by their indices."""


class Transfer(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One strided block of a checkpoint tensor on its way from a source to a target parameter.

    All three views share the loops `extents`. `wire` counts wire elements from `slot_offset` (bytes
    from the start of the group's slot), where a block of the tensor lies in the order of the checkpoint:
    it is the same for all that hold or need the block, however they keep it. A loop with wire stride 0
    replicates at the target, and the sender skips it. The wire carries the narrower dtype of the pair.
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
    """The contiguous byte range of a group's slot that one writer fills with one put."""

    writer: WorkerId
    offset: int
    nbytes: int
    transfers: tuple[Transfer, ...]


class Group(msgspec.Struct, frozen=True):
    """The regions that travel together through one slot of one receiver; all its pieces must land."""

    receiver: WorkerId
    index: int
    nbytes: int
    pieces: tuple[Piece, ...]
    stage: int = 1


class PlannedCell(msgspec.Struct, frozen=True, array_like=True):
    """Elements of each tensor of a class that the same workers hold and need, and who sends which blocks.

    A tensor is cut into `num_blocks` blocks of at most `max_elements`; the blocks of all tensors, in order,
    are divided among `owners` (indices of workers) evenly mixed, `counts` to each.
    """

    region: Region
    wire_dtype: str
    held: tuple[Place, ...]
    """(table, row) of trainers, one row for each table."""
    needed: tuple[Place, ...]
    """(table, row) of rollouts."""
    num_blocks: int
    max_elements: int
    owners: tuple[int, ...]
    counts: dict[str, tuple[int, ...]]
    """By the receiver's host if that has trainers; the others are under the empty name."""

    @property
    def nbytes(self) -> int:
        """Of one tensor."""
        return self.region.num_elements * itemsize(self.wire_dtype)


class PlannedRow(msgspec.Struct, frozen=True, array_like=True):
    """Tensors that parameters of one dtype hold by one region; `column` is an index into the plan's."""

    dtype: str
    region: Region
    column: int


class PlannedTable(msgspec.Struct, frozen=True, array_like=True):
    """What some equal workers hold or need, and which sets of tensors their loader needs in one call."""

    rows: tuple[PlannedRow, ...]
    indivisible: tuple[tuple[str, ...], ...]


class PlannedClass(msgspec.Struct, frozen=True, array_like=True):
    """Tensors that are alike on every worker, and the cells of each of them."""

    stems: tuple[str, ...]
    layers: tuple[int, ...]
    cells: tuple[PlannedCell, ...]

    @property
    def num_tensors(self) -> int:
        return len(self.stems) * len(self.layers)

    def tensors(self) -> tuple[str, ...]:
        """Return their names, layer by layer."""
        return tuple(names_of(self.stems, self.layers))


class PlannedExchange(msgspec.Struct, frozen=True, array_like=True):
    """Rollouts, on hosts without trainers, that pass on to each other what exactly they need.

    A group enters each host at one member, its port there, and that sends it to the others on the host. One
    of all members that take a version together, its entry, sends it to the ports of other hosts, and trainers
    to the port on the host of the entry, which is the entry itself unless its link takes too much. Who is
    entry and port follows shares: of what leaves hosts, and on each host of what arrives there.
    """

    tables: tuple[int, ...]
    """Of the members. What is passed on is in a row of each of these tables, and of no other."""
    members: tuple[int, ...]
    """In ascending order."""
    entries: tuple[int, ...]
    """By member."""
    ports: tuple[int, ...]
    """By member; they compare those of one host."""


class Plan(msgspec.Struct, frozen=True):
    """Who sends which region to whom, by classes of equal tensors and equal workers.

    `wbridge.plan.expand` turns it into the groups, pieces and transfers of one worker.
    """

    workers: tuple[WorkerId, ...]
    hosts: tuple[str, ...]
    """Of each worker."""
    columns: tuple[Column, ...]
    tables: tuple[PlannedTable, ...]
    table_of: tuple[int, ...]
    """The table of each worker."""
    classes: tuple[PlannedClass, ...]
    num_unused_tensors: int
    """Tensors that trainers hold and no rollout needs."""
    slot_nbytes: int
    fingerprint: str
    exchanges: tuple[PlannedExchange, ...] = ()
    """Relays; what is in none comes from trainers."""

    def row(self, place: Place) -> PlannedRow:
        return self.tables[place[0]].rows[place[1]]

    def index(self, worker: WorkerId) -> int:
        """Return the place of `worker` in `workers`.

        Raises:
            PlanError: the plan does not know this worker.
        """
        try:
            return self.workers.index(worker)
        except ValueError:
            raise PlanError(
                f"{worker} is not in plan {self.fingerprint[:12]}; plan again with its source map"
            ) from None


class Outgoing(msgspec.Struct, frozen=True):
    """One piece that a worker writes: `piece` is piece `piece_index` of group `group_index` of `receiver`."""

    receiver: WorkerId
    group_index: int
    piece_index: int
    piece: Piece


class Exchange(msgspec.Struct, frozen=True):
    """A `PlannedExchange` as its members and trainers need it: see `wbridge.plan.routes`."""

    members: tuple[WorkerId, ...]
    hosts: tuple[str, ...]
    entries: tuple[int, ...]
    ports: tuple[int, ...]
    numbers: tuple[tuple[int, ...], ...]
    """By member: the index that each group of the exchange has among all that the member receives."""
    sizes: tuple[int, ...]
    """Bytes of each group."""


class WorkerPlan(msgspec.Struct, frozen=True):
    """What one worker needs of a plan: the groups it receives and the pieces it writes, in group order.

    The writers of all pieces are trainers. Members of an exchange get most of them from each other, and
    from the trainers when that fails.
    """

    worker: WorkerId
    incoming: tuple[Group, ...]
    outgoing: tuple[Outgoing, ...]
    fingerprint: str
    exchanges: tuple[Exchange, ...] = ()
    """Of a rollout those that it is in, of a trainer those to whose members it may write."""
