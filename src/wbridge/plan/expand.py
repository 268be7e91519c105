"""expand: from a plan by classes to the groups, pieces and transfers of one worker."""

from __future__ import annotations

from collections.abc import Iterator

from wbridge.ids import WorkerId
from wbridge.layout.dtype import itemsize
from wbridge.layout.region import Strided
from wbridge.plan.balance import ANYWHERE, spread
from wbridge.plan.checks import check_group
from wbridge.plan.classes import needed_region
from wbridge.plan.exchanges import group_nbytes
from wbridge.plan.geometry import Chunk, Geometry, at_origin, distinct
from wbridge.plan.schedule import Inflow, Item, PackedGroup, schedule
from wbridge.plan.tables import Column
from wbridge.plan.types import (
    Exchange,
    Group,
    Outgoing,
    Piece,
    Place,
    Plan,
    PlannedCell,
    PlannedClass,
    Transfer,
    WorkerPlan,
)

Receivers = tuple[int, str]
"""Rollouts with one table, on one host if that has trainers: all of them get the same from the same."""


class Expansion:
    """Writes out what single workers need of a plan, and remembers what equal workers share."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._geometry = Geometry()
        roles = [worker.role for worker in plan.workers]
        near = {host for host, role in zip(plan.hosts, roles, strict=True) if role == "trainer"}
        self._members: dict[Receivers, list[int]] = {}
        for index, table in enumerate(plan.table_of):
            if roles[index] == "rollout":
                host = plan.hosts[index] if plan.hosts[index] in near else ANYWHERE
                self._members.setdefault((table, host), []).append(index)
        self._by_table: dict[int, list[_Part]] | None = None
        self._intakes: dict[Receivers, Intake] = {}
        self._places: dict[tuple[int, Place], list[tuple[str, int]]] = {}
        self._names: dict[int, tuple[str, ...]] = {}
        self._exchanges = {
            (plan.table_of[exchange.members[0]], ANYWHERE): exchange for exchange in plan.exchanges
        }

    def groups_into(self, receiver: WorkerId) -> tuple[Group, ...]:
        """Return the groups of a receiver, index 0..G-1; a trainer has none.

        Raises:
            PlanError: the plan does not know this worker.
        """
        index = self._plan.index(receiver)
        intake = next((self._intake(key) for key, own in self._members.items() if index in own), None)
        if intake is None:
            return ()
        groups = tuple(
            Group(
                receiver=receiver,
                index=number,
                nbytes=group.nbytes,
                pieces=tuple(intake.piece(number, k) for k in range(len(group.pieces))),
            )
            for number, group in enumerate(intake.groups)
        )
        for group in groups:
            check_group(group, self._plan.slot_nbytes)
        return groups

    def slice_for(self, worker: WorkerId) -> WorkerPlan:
        """Return the part of the plan that concerns `worker`.

        Raises:
            PlanError: the plan does not know this worker.
        """
        index = self._plan.index(worker)
        return WorkerPlan(
            worker=worker,
            incoming=self.groups_into(worker),
            outgoing=tuple(self._outgoing(index)),
            fingerprint=self._plan.fingerprint,
            exchanges=tuple(
                self._exchange(key)
                for key, exchange in self._exchanges.items()
                if index in exchange.members or self._has_part(index, key)
            ),
        )

    def exchanges(self) -> Iterator[tuple[list[int], Intake, Exchange]]:
        """Yield the members of each exchange, the groups that each of them receives, and the exchange."""
        for key in self._exchanges:
            yield self._members[key], self._intake(key), self._exchange(key)

    def _exchange(self, key: Receivers) -> Exchange:
        planned, workers = self._exchanges[key], self._plan.workers
        return Exchange(
            members=tuple(workers[k] for k in planned.members),
            hosts=tuple(self._plan.hosts[k] for k in planned.members),
            entries=planned.entries,
            ports=planned.ports,
            num_groups=len(self._intake(key).groups),
        )

    def _has_part(self, writer: int, receivers: Receivers) -> bool:
        return any(part.has_writer(writer, receivers[1]) for part in self._parts(receivers[0]))

    def all_groups(self) -> tuple[Group, ...]:
        """Return the groups of every receiver: for small plans, and for explaining."""
        rollouts = [worker for worker in self._plan.workers if worker.role == "rollout"]
        return tuple(group for worker in rollouts for group in self.groups_into(worker))

    def intakes(self) -> Iterator[tuple[list[int], Intake]]:
        """Yield the groups that some rollouts receive, with the indices of all of them."""
        for receivers, members in self._members.items():
            yield members, self._intake(receivers)

    def pairs(self) -> Iterator[tuple[set[int], list[int]]]:
        """Yield who writes to whom: some writers, and receivers to each of which all of them write."""
        for (table, host), members in self._members.items():
            writers: set[int] = set()
            for part in self._parts(table):
                counts = zip(part.cell.owners, part.counts(host), strict=True)
                writers.update(owner for owner, count in counts if count)
            yield writers, members
        for exchange in self._plan.exchanges:
            yield set(exchange.members), list(exchange.members)

    def _outgoing(self, writer: int) -> list[Outgoing]:
        found: list[Outgoing] = []
        for receivers, members in self._members.items():
            if not self._has_part(writer, receivers):
                continue
            intake = self._intake(receivers)
            for number, group in enumerate(intake.groups):
                for k, packed in enumerate(group.pieces):
                    if packed.writer == writer:
                        piece = intake.piece(number, k)
                        found += (Outgoing(self._plan.workers[m], number, k, piece) for m in members)
        found.sort(key=lambda o: (o.group_index, o.receiver, o.piece_index))
        return found

    def _intake(self, receivers: Receivers) -> Intake:
        if receivers not in self._intakes:
            exchange = self._exchanges.get(receivers)
            num_sharing = len(exchange.members) if exchange is not None else 1
            self._intakes[receivers] = Intake(
                self._plan, receivers, self._parts(receivers[0]), self, num_sharing
            )
        return self._intakes[receivers]

    def _parts(self, table: int) -> list[_Part]:
        if self._by_table is None:
            self._by_table = {}
            for number, planned in enumerate(self._plan.classes):
                for cell in planned.cells:
                    for place in cell.needed:
                        part = _Part(number, planned, cell, place)
                        self._by_table.setdefault(place[0], []).append(part)
        return self._by_table.get(table, [])

    @property
    def geometry(self) -> Geometry:
        return self._geometry

    def column(self, place: Place) -> Column:
        return self._plan.columns[self._plan.row(place).column]

    def places(self, part: _Part, place: Place) -> list[tuple[str, int]]:
        """Return the parameter and offset of each tensor of a class in a row."""
        key = (part.number, place)
        if key not in self._places:
            planned = part.planned
            self._places[key] = self.column(place).places(planned.stems, planned.layers)
        return self._places[key]

    def tensors(self, part: _Part) -> tuple[str, ...]:
        """Return the names of a class."""
        if part.number not in self._names:
            self._names[part.number] = part.planned.tensors()
        return self._names[part.number]


class _Part:
    """A cell as one row needs it."""

    __slots__ = ("cell", "number", "place", "planned")

    def __init__(self, number: int, planned: PlannedClass, cell: PlannedCell, place: Place) -> None:
        self.number, self.planned, self.cell, self.place = number, planned, cell, place

    def counts(self, host: str) -> tuple[int, ...]:
        return self.cell.counts[host]

    def has_writer(self, writer: int, host: str) -> bool:
        owners = self.cell.owners
        return writer in owners and self.counts(host)[owners.index(writer)] > 0


class Intake:
    """The groups of all receivers of one kind; their pieces are written out when asked for."""

    def __init__(
        self, plan: Plan, receivers: Receivers, parts: list[_Part], shared: Expansion, num_sharing: int
    ) -> None:
        """`num_sharing`: how many receivers pass these groups on to each other, themselves included."""
        self._plan, self._parts, self._shared = plan, parts, shared
        table, host = receivers
        inflows = [self._inflow(part, host) for part in parts]
        nbytes = plan.slot_nbytes
        if num_sharing > 1:
            nbytes = group_nbytes(sum(inflow.nbytes for inflow in inflows), num_sharing, nbytes)
        self.groups: tuple[PackedGroup, ...] = schedule(inflows, plan.tables[table].indivisible, nbytes)
        self._pieces: dict[tuple[int, int], Piece] = {}
        self._ways: dict[tuple[int, int], _Way] = {}

    def piece(self, group: int, index: int) -> Piece:
        if (group, index) not in self._pieces:
            packed = self.groups[group].pieces[index]
            self._pieces[group, index] = Piece(
                writer=self._plan.workers[packed.writer],
                offset=packed.offset,
                nbytes=packed.nbytes,
                transfers=tuple(self._transfers(packed.writer, packed.offset, packed.items)),
            )
        return self._pieces[group, index]

    def num_transfers(self) -> int:
        """Return how many transfers one receiver takes."""
        return sum(count for group in range(len(self.groups)) for _, count in self.transfers_in(group))

    def transfers_in(self, group: int) -> list[tuple[int, int]]:
        """Return the writer of each piece of a group, by its index, and how many transfers the piece has."""
        return [
            (
                piece.writer,
                sum(self._way(item.inflow, piece.writer).num_transfers(item) for item in piece.items),
            )
            for piece in self.groups[group].pieces
        ]

    def _inflow(self, part: _Part, host: str) -> Inflow:
        cell = part.cell
        element_nbytes = itemsize(cell.wire_dtype)
        wanted, geometry = at_origin(needed_region(self._plan.row(part.place).region)), self._shared.geometry
        sizes = tuple(
            sum(overlap.num_wire_elements for overlap in geometry.overlaps(block, wanted)) * element_nbytes
            for block in geometry.blocks(cell.region, cell.max_elements)
        )
        writers = tuple([cell.owners[k] for k in spread(part.counts(host))])
        return Inflow(self._shared.tensors(part), sizes, element_nbytes, writers)

    def _transfers(self, writer: int, start: int, items: list[Item]) -> Iterator[Transfer]:
        end = start
        for item in items:
            yield from self._way(item.inflow, writer).transfers(item, end)
            end += item.nbytes

    def _way(self, inflow: int, writer: int) -> _Way:
        key = (inflow, self._plan.table_of[writer])
        if key not in self._ways:
            self._ways[key] = _Way(self._plan, self._parts[inflow], key[1], self._shared)
        return self._ways[key]


class _Way:
    """How the blocks of one cell lie with the writers of one table and with one receiving row."""

    def __init__(self, plan: Plan, part: _Part, table: int, shared: Expansion) -> None:
        cell = part.cell
        held_place = next(place for place in cell.held if place[0] == table)
        self._held = shared.places(part, held_place)
        self._needed = shared.places(part, part.place)
        self._tensors, self._wire_dtype = shared.tensors(part), cell.wire_dtype
        wanted, repeats = distinct(plan.row(part.place).region)
        held, geometry = plan.row(held_place).region, shared.geometry
        self._chunks = [
            [_Loops(chunk, repeats) for chunk in geometry.chunks(held, at_origin(wanted), block)]
            for block in geometry.blocks(cell.region, cell.max_elements)
        ]
        self._element_nbytes = itemsize(cell.wire_dtype)

    def num_transfers(self, item: Item) -> int:
        return len(self._chunks[item.block])

    def transfers(self, item: Item, end: int) -> Iterator[Transfer]:
        source_parameter, source_offset = self._held[item.tensor]
        target_parameter, target_offset = self._needed[item.tensor]
        for loops in self._chunks[item.block]:
            yield Transfer(
                tensor=self._tensors[item.tensor],
                extents=loops.extents,
                source_parameter=source_parameter,
                source=Strided(loops.source_offset + source_offset, loops.source),
                target_parameter=target_parameter,
                target=Strided(loops.target_offset + target_offset, loops.target),
                wire=loops.wire,
                wire_dtype=self._wire_dtype,
                slot_offset=end,
            )
            end += loops.num_elements * self._element_nbytes


class _Loops:
    """A chunk with the loops in which its target repeats it."""

    def __init__(self, chunk: Chunk, repeats: tuple[tuple[int, int], ...]) -> None:
        overlap, nothing = chunk.overlap, (0,) * len(repeats)
        self.extents = overlap.extents + tuple(extent for extent, _ in repeats)
        self.source_offset, self.source = overlap.left.offset, overlap.left.strides + nothing
        self.target_offset = overlap.right.offset
        self.target = overlap.right.strides + tuple(stride for _, stride in repeats)
        self.wire = Strided(0, chunk.wire.strides + nothing)
        self.num_elements = chunk.num_elements
