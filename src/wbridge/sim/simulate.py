"""simulate: one version, from the trainers' send to the last engine that has applied it, on virtual time."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, Literal

import msgspec

from wbridge.config import Config
from wbridge.errors import InternalError
from wbridge.flow.actions import GiveCredit
from wbridge.flow.outgoing import Piece
from wbridge.layout.dtype import itemsize
from wbridge.plan.bound import Bound, lower_bound
from wbridge.plan.build import ANY_TOPOLOGY
from wbridge.plan.expand import Expansion
from wbridge.plan.geometry import Geometry
from wbridge.plan.schedule import ring_slots
from wbridge.plan.topology import Links, Topology, find_links
from wbridge.plan.types import Exchange, Plan
from wbridge.sim.coordinator import Coordinator
from wbridge.sim.engine import Engine
from wbridge.sim.fabric import Fabric, LinkBytes
from wbridge.sim.folding import fold_engines
from wbridge.sim.reader import Reader
from wbridge.sim.relay import Relay
from wbridge.sim.routing import Routing
from wbridge.sim.speeds import Speeds
from wbridge.sim.thinning import Deliveries, busy, thinned
from wbridge.sim.world import World
from wbridge.sim.writer import Writer

Fold = Literal["none", "engines", "ranks"]

BUSY: Final = 0.6
"""Ranks are simulated one by one if trainers send for a larger part of the least time: then they compete."""


class Outcome(msgspec.Struct, frozen=True):
    """What became of one version."""

    time_s: float
    """From the first send to the last engine that has applied it and goes on."""
    landed_s: float
    """Until all bytes were in slots."""
    bound: Bound
    time_over_bound: float
    agst_s: float
    """Stall averaged over all workers, trainers and rollouts."""
    trainer_stall_s: float
    rollout_stall_s: float
    arrived_nbytes: dict[str, int]
    """By rollout that was simulated."""
    needed_nbytes: dict[str, int]
    num_puts: int
    num_workers: int
    num_simulated: int
    """Workers that were simulated; each of the others is equal to one of them."""
    links: tuple[LinkBytes, ...]


def simulate(
    plan: Plan,
    config: Config,
    topology: Topology = ANY_TOPOLOGY,
    speeds: Speeds | None = None,
    *,
    fold: Fold = "engines",
) -> Outcome:
    """Run the plan and the protocol's machines, once all engines wait in their polls.

    `fold` says which equal workers are simulated once: with "engines", of equal engines one; that loses
    nothing. With "ranks", of rollouts that pass on what they get also only one rank, if other ranks do the
    same over NICs of their own, and trainers' NICs are idle half of the time; it gets what others leave.
    """
    return _Job(plan, config, topology, speeds or Speeds(), fold).run()


class _Job:
    def __init__(self, plan: Plan, config: Config, topology: Topology, speeds: Speeds, fold: Fold) -> None:
        self._plan, self._config, self._topology = plan, config, topology
        links = find_links(plan.workers, plan.hosts, topology)
        each = tuple((k,) for k in range(len(plan.workers)))
        self._copies: Sequence[Sequence[int]] = each if fold == "none" else fold_engines(plan, links)
        self._fabric = Fabric(plan, topology, speeds, self._copies)
        self._num_alike = dict.fromkeys(range(len(plan.workers)), 1)
        self._ranks = [k for k, worker in enumerate(plan.workers) if worker.role == "trainer"]
        self._index = {str(worker): k for k, worker in enumerate(plan.workers)}
        self._readers: dict[int, Reader] = {}
        self._held_nbytes = _held_nbytes(plan)
        self._reported_s: dict[int, float] = {}
        self._relaying: list[Writer] = []
        self._sent: dict[int, dict[int, dict[Piece, int]]] = {k: {} for k in self._ranks}
        expansion = Expansion(plan)
        deliveries: Deliveries = tuple(expansion.deliveries())
        exchanges = expansion.exchanges()
        if fold == "ranks":
            deliveries, exchanges = self._thinned(deliveries, exchanges, links)
        self._routing = Routing(plan, exchanges)
        self._world = World(self._fabric, speeds, config, len(plan.workers))
        self._read_plan(deliveries)
        self._writers = {k: Writer(self._world, k, own, self._readers) for k, own in self._sent.items()}
        self._relays = self._build_relays()
        self._engines = self._build_engines()
        self._coordinator = Coordinator(self._world, self._ranks, self._writers, self._engines, self._routing)

    def _thinned(
        self, deliveries: Deliveries, exchanges: tuple[Exchange, ...], links: Links
    ) -> tuple[Deliveries, tuple[Exchange, ...]]:
        """Leave out those that others stand for, and of the trainers' NICs what they would take: their bytes
        over the least time of a version."""
        _, bound = lower_bound(self._plan, links, Geometry())
        found = thinned(self._plan, links, deliveries, exchanges)
        all_s = busy(self._plan, links, deliveries, exchanges)
        if max(all_s.values()) > BUSY * bound.relayed_s:
            return deliveries, exchanges
        self._num_alike.update(found.num_alike)
        kept_s = busy(self._plan, links, found.deliveries, found.exchanges)
        for link, busy_s in all_s.items():
            self._fabric.keep_share(link, 1 - (busy_s - kept_s.get(link, 0.0)) / bound.relayed_s)
        return found.deliveries, found.exchanges

    def _read_plan(self, deliveries: Deliveries) -> None:
        """Build the readers, and note what each trainer may write to them."""
        names, config = [str(worker) for worker in self._plan.workers], self._config
        for members, delivered in deliveries:
            packed = [intake.groups[turn] for intake, turn in delivered]
            groups = [[(names[piece.writer], piece.nbytes) for piece in g.pieces] for g in packed]
            passes_on = bool(self._routing.others(members[0]))
            slots = ring_slots(config, len(groups), config.mode.receiver_staging, passes_on=passes_on)
            by_writer: dict[int, dict[Piece, int]] = {}
            for number, group in enumerate(packed):
                for place, piece in enumerate(group.pieces):
                    by_writer.setdefault(piece.writer, {})[number, place] = piece.nbytes
            for k in (k for k in members if self._copies[k]):
                self._readers[k] = Reader(
                    self._world,
                    index=k,
                    name=names[k],
                    engine=self._plan.workers[k].group,
                    groups=groups,
                    num_slots=max(1, slots),
                    takes_parked=config.takes_parked(len(groups)),
                )
                for writer, own in by_writer.items():
                    self._sent[writer][k] = own

    def _build_relays(self) -> dict[int, Relay]:
        found: dict[int, Relay] = {}
        pieces = {
            k: {(number, place): n for number, own in enumerate(reader.sizes) for place, n in enumerate(own)}
            for k, reader in self._readers.items()
        }
        for k, reader in self._readers.items():
            if others := self._routing.others(k):
                writer = Writer(self._world, k, {m: pieces[m] for m in others}, self._readers)
                relay = Relay(writer, {m: self._readers[m].name for m in others}, reader.num_pieces)
                found[k] = reader.relay = relay
                self._relaying.append(writer)
        return found

    def _build_engines(self) -> dict[str, tuple[int, Engine]]:
        members: dict[str, list[int]] = {}
        for k in sorted(self._readers):
            members.setdefault(self._plan.workers[k].group, []).append(k)
        return {
            name: (own[0], Engine(self._world, name, own, self._readers, self._serve))
            for name, own in members.items()
        }

    def _serve(self, worker: int, ticket: int, engines: Sequence[str]) -> None:
        """A rollout takes a ticket, with the workers of these engines."""
        reader = self._readers[worker]
        sources = self._routing.sources(worker, engines)
        if worker in self._relays:
            self._relays[worker].serve(ticket, self._routing.duties(worker, engines))
        reader.serve(ticket, {group: self._readers[k].name for group, k in sources.items()})

    def run(self) -> Outcome:
        for _, engine in self._engines.values():
            engine.start(self._coordinator.from_leader)
        for k, reader in self._readers.items():
            _, engine = self._engines[reader.engine]
            reader.start(partial(self._give, k), partial(engine.from_ring, k))
        for rank, k in enumerate(self._ranks):
            self._world.copy(k, self._snapshot_nbytes(k), partial(self._report, rank))
        self._awaited: list[Callable[[], bool]] = [engine.has_left for _, engine in self._engines.values()]
        if self._config.source_held:
            self._awaited += [writer.is_free for writer in self._writers.values()]
        if not self._world.timeline.run(self._is_over):
            raise InternalError(
                "the simulation stands still before all engines have applied; please report it"
            )
        return self._outcome()

    def _snapshot_nbytes(self, trainer: int) -> int:
        """What is copied before the send is reported: nothing if the weights themselves are held still."""
        if self._config.source_held:
            return 0
        return self._held_nbytes.get(self._plan.table_of[trainer], 0)

    def _report(self, rank: int) -> None:
        self._reported_s[self._ranks[rank]] = self._world.timeline.now
        self._coordinator.report(rank)

    def _give(self, reader: int, credit: GiveCredit) -> None:
        """Bring a credit to its writer; one to each copy of the reader."""
        writer = self._index[credit.writer]
        name = self._readers[reader].name
        end = self._writers.get(writer) or self._relays[writer]
        call = partial(end.credit, name, credit.ticket, (credit.group, credit.piece))
        self._world.send(reader, writer, call)

    def _is_over(self) -> bool:
        """Snapshots are not waited for: with `latest` they are kept until there is a newer version."""
        while self._awaited and self._awaited[-1]():
            self._awaited.pop()
        return not self._awaited

    def _outcome(self) -> Outcome:
        plan, geometry = self._plan, Geometry()
        links = find_links(plan.workers, plan.hosts, self._topology)
        _, bound = lower_bound(plan, links, geometry)
        stalls = {k: s for _, engine in self._engines.values() for k, s in engine.stalls_s.items()}
        rollouts = [s for k, s in stalls.items() for _ in range(len(self._copies[k]) * self._num_alike[k])]
        trainers = list(self._trainer_stalls().values())
        landed = [reader.landed_s for reader in self._readers.values() if reader.landed_s is not None]
        time_s = max(engine.done_s for _, engine in self._engines.values())
        return Outcome(
            time_s=time_s,
            landed_s=max(landed),
            bound=bound,
            time_over_bound=time_s / bound.relayed_s,
            agst_s=statistics.fmean(trainers + rollouts),
            trainer_stall_s=statistics.fmean(trainers),
            rollout_stall_s=statistics.fmean(rollouts),
            arrived_nbytes={reader.name: reader.arrived_nbytes for reader in self._readers.values()},
            needed_nbytes={reader.name: reader.needed_nbytes for reader in self._readers.values()},
            num_puts=sum(writer.num_puts for writer in (*self._writers.values(), *self._relaying)),
            num_workers=len(plan.workers),
            num_simulated=len(self._ranks) + len(self._readers),
            links=self._world.fabric.report(self._world.network.carried),
        )

    def _trainer_stalls(self) -> Mapping[int, float]:
        """With held weights until they are free, else until the snapshot is taken."""
        if not self._config.source_held:
            return self._reported_s
        return {k: writer.free_s for k, writer in self._writers.items() if writer.free_s is not None}


def _held_nbytes(plan: Plan) -> dict[int, int]:
    """Return what the trainers with each table hold of what is needed."""
    found: dict[int, int] = {}
    for planned in plan.classes:
        for place in {place for cell in planned.cells for place in cell.held}:
            row = plan.row(place)
            nbytes = planned.num_tensors * row.region.num_elements * itemsize(row.dtype)
            found[place[0]] = found.get(place[0], 0) + nbytes
    return found
