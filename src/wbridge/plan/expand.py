"""expand: from a plan by classes to the groups, pieces and transfers of one worker."""

from __future__ import annotations

from collections.abc import Iterator

from wbridge.ids import WorkerId
from wbridge.layout.dtype import itemsize
from wbridge.layout.region import Strided
from wbridge.plan.balance import spread
from wbridge.plan.checks import check_group
from wbridge.plan.exchanges import group_nbytes
from wbridge.plan.geometry import Chunk, Geometry, at_origin, distinct
from wbridge.plan.receivers import ANYWHERE, Rollouts, Stream
from wbridge.plan.routes import partners_of
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

Turn = tuple[Stream, int]
"""A group of a stream, by its index there."""


class Expansion:
    """Writes out what single workers need of a plan, and remembers what equal workers share."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._geometry = Geometry()
        self._rollouts = Rollouts(plan.workers, plan.table_of, plan.hosts)
        self._exchanges = {(exchange.tables, ANYWHERE): exchange for exchange in plan.exchanges}
        self._passing = {table for exchange in plan.exchanges for table in exchange.tables}
        self._by_stream: dict[Stream, list[_Part]] | None = None
        self._intakes: dict[Stream, Intake] = {}
        self._orders: dict[tuple[int, str], list[Turn]] = {}
        self._numbers: dict[tuple[int, str], dict[Stream, list[int]]] = {}
        self._version_nbytes: dict[int, int] = {}
        self._places: dict[tuple[int, Place], list[tuple[str, int]]] = {}
        self._names: dict[int, tuple[str, ...]] = {}

    def groups_into(self, receiver: WorkerId) -> tuple[Group, ...]:
        """Return the groups of a receiver, index 0..G-1; a trainer has none.

        Raises:
            PlanError: the plan does not know this worker.
        """
        kind = self._rollouts.kind_of(self._plan.index(receiver))
        if kind is None:
            return ()
        groups = tuple(
            self._intake(stream).group(turn, receiver, index, kind[0])
            for index, (stream, turn) in enumerate(self._order(kind))
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
                self._exchange(stream)
                for stream, exchange in self._exchanges.items()
                if index in exchange.members or self._has_part(index, stream)
            ),
        )

    def exchanges(self) -> tuple[Exchange, ...]:
        """Return all of them."""
        return tuple(map(self._exchange, self._exchanges))

    def _exchange(self, stream: Stream) -> Exchange:
        planned, plan = self._exchanges[stream], self._plan
        numbers = {table: tuple(self._numbers_of(stream, table)) for table in planned.tables}
        return Exchange(
            members=tuple(plan.workers[k] for k in planned.members),
            hosts=tuple(plan.hosts[k] for k in planned.members),
            entries=planned.entries,
            ports=planned.ports,
            numbers=tuple(numbers[plan.table_of[k]] for k in planned.members),
            sizes=tuple(group.nbytes for group in self._intake(stream).groups),
        )

    def _numbers_of(self, stream: Stream, table: int) -> list[int]:
        """Return which of all groups of a rollout those of one stream are."""
        kind = table, stream[1]
        if kind not in self._numbers:
            found = self._numbers[kind] = {}
            for number, (own, _) in enumerate(self._order(kind)):
                found.setdefault(own, []).append(number)
        return self._numbers[kind][stream]

    def _order(self, kind: tuple[int, str]) -> list[Turn]:
        """Return the groups of some rollouts, those of all their streams evenly mixed.

        Rollouts that share several streams get the groups of these in one order: so rings do not deadlock.
        """
        if kind not in self._orders:
            keyed: list[tuple[float, Stream, int]] = []
            for stream in self._parts():
                if kind[0] in stream[0] and kind[1] == stream[1]:
                    num_groups = len(self._intake(stream).groups)
                    keyed += [((turn + 0.5) / num_groups, stream, turn) for turn in range(num_groups)]
            self._orders[kind] = [(stream, turn) for _, stream, turn in sorted(keyed)]
        return self._orders[kind]

    def _has_part(self, writer: int, stream: Stream) -> bool:
        return any(part.has_writer(writer) for part in self._parts()[stream])

    def all_groups(self) -> tuple[Group, ...]:
        """Return the groups of every receiver: for small plans, and for explaining."""
        rollouts = [worker for worker in self._plan.workers if worker.role == "rollout"]
        return tuple(group for worker in rollouts for group in self.groups_into(worker))

    def deliveries(self) -> Iterator[tuple[list[int], list[tuple[Intake, int]]]]:
        """Yield rollouts that get the same, by their indices, and the groups that each of them receives."""
        for kind, members in self._rollouts.kinds.items():
            yield members, [(self._intake(stream), turn) for stream, turn in self._order(kind)]

    def pairs(self) -> Iterator[tuple[set[int], list[int]]]:
        """Yield who writes to whom: some writers, and receivers to each of which all of them write."""
        for stream, parts in self._parts().items():
            writers: set[int] = set()
            for part in parts:
                writers.update(owner for owner, count in part.shares if count)
            yield writers, list(self._rollouts.of_stream(stream))
        index = {worker: k for k, worker in enumerate(self._plan.workers)}
        for exchange in self.exchanges():
            for member in exchange.members:
                yield {index[member]}, [index[partner] for partner in partners_of(exchange, member)]

    def _outgoing(self, writer: int) -> list[Outgoing]:
        found: list[Outgoing] = []
        for stream in self._parts():
            if not self._has_part(writer, stream):
                continue
            intake, members = self._intake(stream), self._rollouts.of_stream(stream)
            numbers = {table: self._numbers_of(stream, table) for table in stream[0]}
            receivers = [(self._plan.workers[k], numbers[self._plan.table_of[k]]) for k in members]
            for turn, group in enumerate(intake.groups):
                for k, packed in enumerate(group.pieces):
                    if packed.writer == writer:
                        piece = intake.piece(turn, k, stream[0][0])
                        found += (Outgoing(worker, own[turn], k, piece) for worker, own in receivers)
        found.sort(key=lambda o: (o.group_index, o.receiver, o.piece_index))
        return found

    def _intake(self, stream: Stream) -> Intake:
        if stream not in self._intakes:
            parts, nbytes = self._parts()[stream], self._plan.slot_nbytes
            if stream[1] == ANYWHERE and self._passing.intersection(stream[0]):
                num_members = len(self._rollouts.of_stream(stream))
                version_nbytes = min(self._version_nbytes[table] for table in stream[0])
                nbytes = group_nbytes(version_nbytes, num_members, nbytes)
            self._intakes[stream] = Intake(self._plan, stream, parts, self, nbytes)
        return self._intakes[stream]

    def _parts(self) -> dict[Stream, list[_Part]]:
        """Return what consists of which cells: an exchange, or all that others with one table get."""
        if self._by_stream is None:
            self._by_stream = {}
            for number, planned in enumerate(self._plan.classes):
                for cell in planned.cells:
                    for host, tables in self._rollouts.needing(cell.needed).items():
                        part = _Part(number, planned, cell, host)
                        shared = (tables, host) in self._exchanges
                        for own in (tables,) if shared else [(table,) for table in tables]:
                            self._by_stream.setdefault((own, host), []).append(part)
                        for table in tables if host == ANYWHERE else ():
                            known = self._version_nbytes.get(table, 0)
                            self._version_nbytes[table] = known + part.nbytes
        return self._by_stream

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
    """A cell as the rollouts of one host need it, or those of all hosts without trainers."""

    __slots__ = ("cell", "host", "number", "planned")

    def __init__(self, number: int, planned: PlannedClass, cell: PlannedCell, host: str) -> None:
        self.number, self.planned, self.cell, self.host = number, planned, cell, host

    @property
    def counts(self) -> tuple[int, ...]:
        return self.cell.counts[self.host]

    @property
    def shares(self) -> Iterator[tuple[int, int]]:
        """Each owner, and how many blocks it sends."""
        return zip(self.cell.owners, self.counts, strict=True)

    @property
    def nbytes(self) -> int:
        return self.planned.num_tensors * self.cell.nbytes

    def has_writer(self, writer: int) -> bool:
        owners = self.cell.owners
        return writer in owners and self.counts[owners.index(writer)] > 0


class Intake:
    """The groups of one stream; their pieces are written out when asked for, by the receiver's table."""

    def __init__(
        self, plan: Plan, stream: Stream, parts: list[_Part], shared: Expansion, group_nbytes: int
    ) -> None:
        self._plan, self._parts, self._shared = plan, parts, shared
        self.stream = stream
        inflows = [self._inflow(part) for part in parts]
        indivisible = [own for table in stream[0] for own in plan.tables[table].indivisible]
        self.groups: tuple[PackedGroup, ...] = schedule(inflows, indivisible, group_nbytes)
        self._pieces: dict[tuple[int, int, int], Piece] = {}
        self._ways: dict[tuple[int, int, int], _Way] = {}

    def group(self, turn: int, receiver: WorkerId, index: int, table: int) -> Group:
        """Return one of them as a receiver with this table takes it, `index` among its groups."""
        packed = self.groups[turn]
        pieces = tuple(self.piece(turn, k, table) for k in range(len(packed.pieces)))
        return Group(receiver=receiver, index=index, nbytes=packed.nbytes, pieces=pieces)

    def piece(self, turn: int, index: int, table: int) -> Piece:
        """Return a piece of a group; its bytes are the same for all tables, not where they go."""
        key = turn, index, table
        if key not in self._pieces:
            packed = self.groups[turn].pieces[index]
            self._pieces[key] = Piece(
                writer=self._plan.workers[packed.writer],
                offset=packed.offset,
                nbytes=packed.nbytes,
                transfers=tuple(self._transfers(packed.writer, table, packed.offset, packed.items)),
            )
        return self._pieces[key]

    def transfers_in(self, turn: int, table: int) -> list[tuple[int, int]]:
        """Return the writer of each piece of a group, by its index, and how many transfers the piece has."""
        return [
            (
                piece.writer,
                sum(self._way(item.inflow, piece.writer, table).num_transfers(item) for item in piece.items),
            )
            for piece in self.groups[turn].pieces
        ]

    def _inflow(self, part: _Part) -> Inflow:
        cell = part.cell
        element_nbytes = itemsize(cell.wire_dtype)
        blocks = self._shared.geometry.blocks(cell.region, cell.max_elements)
        sizes = tuple([block.num_elements * element_nbytes for block in blocks])
        writers = tuple([cell.owners[k] for k in spread(part.counts)])
        return Inflow(self._shared.tensors(part), sizes, element_nbytes, writers)

    def _transfers(self, writer: int, table: int, start: int, items: list[Item]) -> Iterator[Transfer]:
        end = start
        for item in items:
            yield from self._way(item.inflow, writer, table).transfers(item, end)
            end += item.nbytes

    def _way(self, inflow: int, writer: int, table: int) -> _Way:
        key = (inflow, self._plan.table_of[writer], table)
        if key not in self._ways:
            self._ways[key] = _Way(self._plan, self._parts[inflow], *key[1:], self._shared)
        return self._ways[key]


class _Way:
    """How the blocks of one cell lie with the writers of one table and with the receivers of another."""

    def __init__(self, plan: Plan, part: _Part, held_by: int, needed_by: int, shared: Expansion) -> None:
        cell, geometry = part.cell, shared.geometry
        held_place = next(place for place in cell.held if place[0] == held_by)
        self._held = shared.places(part, held_place)
        self._tensors, self._wire_dtype = shared.tensors(part), cell.wire_dtype
        held, blocks = plan.row(held_place).region, geometry.blocks(cell.region, cell.max_elements)
        self._targets: list[tuple[list[tuple[str, int]], list[list[_Loops]]]] = []
        for place in (place for place in cell.needed if place[0] == needed_by):
            wanted, repeats = distinct(plan.row(place).region)
            chunks = [geometry.chunks(held, at_origin(wanted), block) for block in blocks]
            loops = [[_Loops(chunk, repeats) for chunk in own] for own in chunks]
            self._targets.append((shared.places(part, place), loops))

    def num_transfers(self, item: Item) -> int:
        return sum(len(loops[item.block]) for _, loops in self._targets)

    def transfers(self, item: Item, start: int) -> Iterator[Transfer]:
        source_parameter, source_offset = self._held[item.tensor]
        for places, blocks in self._targets:
            target_parameter, target_offset = places[item.tensor]
            for loops in blocks[item.block]:
                yield Transfer(
                    tensor=self._tensors[item.tensor],
                    extents=loops.extents,
                    source_parameter=source_parameter,
                    source=Strided(loops.source_offset + source_offset, loops.source),
                    target_parameter=target_parameter,
                    target=Strided(loops.target_offset + target_offset, loops.target),
                    wire=loops.wire,
                    wire_dtype=self._wire_dtype,
                    slot_offset=start,
                )


class _Loops:
    """A chunk with the loops in which its target repeats it."""

    def __init__(self, chunk: Chunk, repeats: tuple[tuple[int, int], ...]) -> None:
        overlap, nothing = chunk.overlap, (0,) * len(repeats)
        self.extents = overlap.extents + tuple(extent for extent, _ in repeats)
        self.source_offset, self.source = overlap.left.offset, overlap.left.strides + nothing
        self.target_offset = overlap.right.offset
        self.target = overlap.right.strides + tuple(stride for _, stride in repeats)
        self.wire = Strided(chunk.wire.offset, chunk.wire.strides + nothing)
