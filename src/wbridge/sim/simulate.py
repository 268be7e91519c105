"""simulate: one version, from the trainers' send to the last engine that has applied it, on virtual time."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial

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
from wbridge.plan.topology import Topology, find_links
from wbridge.plan.types import Plan
from wbridge.sim.coordinator import Coordinator
from wbridge.sim.engine import Engine
from wbridge.sim.fabric import Fabric, LinkBytes
from wbridge.sim.folding import fold
from wbridge.sim.reader import Reader
from wbridge.sim.speeds import Speeds
from wbridge.sim.world import World
from wbridge.sim.writer import Writer


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
    folded: bool = True,
) -> Outcome:
    """Run the plan and the protocol's machines; `folded`: of equal engines, simulate one.

    All engines wait in their polls when the trainers send.
    """
    return _Job(plan, config, topology, speeds or Speeds(), folded=folded).run()


class _Job:
    def __init__(
        self, plan: Plan, config: Config, topology: Topology, speeds: Speeds, *, folded: bool
    ) -> None:
        self._plan, self._config, self._topology = plan, config, topology
        links = find_links(plan.workers, plan.hosts, topology)
        each = tuple((k,) for k in range(len(plan.workers)))
        self._copies: Sequence[Sequence[int]] = fold(plan, links) if folded else each
        fabric = Fabric(plan, topology, speeds, self._copies)
        self._world = World(fabric, speeds, config, len(plan.workers))
        self._ranks = [k for k, worker in enumerate(plan.workers) if worker.role == "trainer"]
        self._index = {str(worker): k for k, worker in enumerate(plan.workers)}
        self._readers: dict[int, Reader] = {}
        self._held_nbytes = _held_nbytes(plan)
        self._reported_s: dict[int, float] = {}
        self._sent: dict[int, dict[int, dict[Piece, int]]] = {k: {} for k in self._ranks}
        self._read_plan()
        self._writers = {k: Writer(self._world, k, own, self._readers) for k, own in self._sent.items()}
        self._engines = self._build_engines()
        self._coordinator = Coordinator(self._world, self._ranks, self._writers, self._engines)

    def _read_plan(self) -> None:
        """Build the readers, and note what each writer has for them."""
        names = [str(worker) for worker in self._plan.workers]
        for members, intake in Expansion(self._plan).intakes():
            groups = [
                [(names[piece.writer], piece.nbytes) for piece in group.pieces] for group in intake.groups
            ]
            for k in (k for k in members if self._copies[k]):
                slots = ring_slots(self._config, len(groups), self._config.mode.receiver_staging)
                self._readers[k] = Reader(
                    self._world,
                    index=k,
                    name=names[k],
                    engine=self._plan.workers[k].group,
                    groups=groups,
                    num_slots=max(1, slots),
                    whole_first=not self._config.offers_are_parked,
                )
                for number, group in enumerate(intake.groups):
                    for place, piece in enumerate(group.pieces):
                        own = self._sent[piece.writer].setdefault(k, {})
                        own[number, place] = piece.nbytes

    def _build_engines(self) -> dict[str, tuple[int, Engine]]:
        members: dict[str, list[int]] = {}
        for k in sorted(self._readers):
            members.setdefault(self._plan.workers[k].group, []).append(k)
        return {
            name: (own[0], Engine(self._world, name, own, self._readers)) for name, own in members.items()
        }

    def run(self) -> Outcome:
        for _, engine in self._engines.values():
            engine.start(self._coordinator.from_leader)
        for k, reader in self._readers.items():
            _, engine = self._engines[reader.engine]
            reader.start(partial(self._give, k), partial(engine.from_ring, k))
        for rank, k in enumerate(self._ranks):
            self._world.copy(k, self._snapshot_nbytes(k), partial(self._report, rank))
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
        call = partial(self._writers[writer].credit, name, credit.ticket, (credit.group, credit.piece))
        self._world.send(reader, writer, call)

    def _is_over(self) -> bool:
        """Snapshots are not waited for: with `latest` they are kept until there is a newer version."""
        waits = self._config.source_held
        return all(engine.is_done for _, engine in self._engines.values()) and not (
            waits and any(writer.free_s is None for writer in self._writers.values())
        )

    def _outcome(self) -> Outcome:
        plan, geometry = self._plan, Geometry()
        links = find_links(plan.workers, plan.hosts, self._topology)
        _, bound = lower_bound(plan, links, geometry)
        stalls = {k: s for _, engine in self._engines.values() for k, s in engine.stalls_s.items()}
        rollouts = [s for k, s in stalls.items() for _ in self._copies[k]]
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
            num_puts=sum(writer.num_puts for writer in self._writers.values()),
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
