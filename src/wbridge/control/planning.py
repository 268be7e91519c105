"""From a roster of members to what each of them is told: the plan, sliced and encoded, and its peers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from wbridge.config import Config
from wbridge.control.agreement import job_values
from wbridge.control.membership import Joined, Member
from wbridge.control.messages import EpochStart, Peer
from wbridge.errors import InternalError, ProtocolError
from wbridge.ids import Epoch, WorkerId
from wbridge.plan.build import build_plan
from wbridge.plan.expand import Expansion
from wbridge.plan.types import WorkerPlan


class Roster(msgspec.Struct, frozen=True):
    """The members of an epoch, in rank order."""

    ranks: tuple[Member, ...]
    engines: dict[str, tuple[Member, ...]]

    @property
    def members(self) -> tuple[Member, ...]:
        return self.ranks + tuple(m for engine in self.engines.values() for m in engine)


class Slices(msgspec.Struct, frozen=True):
    """For each worker its encoded plan and the workers it has to do with."""

    plans: dict[WorkerId, bytes]
    partners: dict[WorkerId, tuple[WorkerId, ...]]


def build_slices(maps: Mapping[WorkerId, Joined], hosts: Mapping[WorkerId, str], config: Config) -> Slices:
    """Plan and slice. Pure and slow: minutes of work for the largest models, so it runs in a worker thread.

    Raises:
        PlanError, LayoutError, CoverageError: as `build_plan`.
    """
    plan = build_plan({worker: joined.source_map for worker, joined in maps.items()}, hosts, config)
    expansion = Expansion(plan)
    slices = {worker: expansion.slice_for(worker) for worker in maps}
    return Slices(
        plans={worker: msgspec.msgpack.encode(piece) for worker, piece in slices.items()},
        partners={worker: tuple(sorted(set(_partners(piece, maps)))) for worker, piece in slices.items()},
    )


def _partners(plan: WorkerPlan, workers: Mapping[WorkerId, Joined]) -> Iterator[WorkerId]:
    me = plan.worker
    yield from (w for w in workers if (w.role, w.group) == (me.role, me.group))
    yield from (outgoing.receiver for outgoing in plan.outgoing)
    for group in plan.incoming:
        for piece in group.pieces:
            yield piece.writer
            yield from piece.holders


def epoch_start(epoch: Epoch, worker: WorkerId, roster: Roster, slices: Slices, config: Config) -> EpochStart:
    """Return what `worker` is told: `peers` are its own group and those its plan names, not everybody."""
    by_worker = {member.worker: member for member in roster.members}
    return EpochStart(
        epoch=epoch,
        worker_plan=slices.plans[worker],
        peers=tuple(_peer(by_worker[partner]) for partner in slices.partners[worker]),
        engines=tuple(roster.engines),
        ranks=tuple(member.worker for member in roster.ranks),
        job=job_values(config),
    )


def leader_address(start: EpochStart, engine: str) -> str:
    """Return where the other workers of `engine` reach its leader.

    Raises:
        ProtocolError: the coordinator left it out.
    """
    for peer in start.peers:
        if peer.worker.role == "rollout" and peer.worker.group == engine and peer.worker.is_leader:
            return peer.lockstep_address
    raise ProtocolError(f"epoch {start.epoch}: the coordinator left out the leader of engine {engine!r}")


def joined_of(member: Member) -> Joined:
    if member.joined is None:
        raise InternalError(f"{member.worker} is in a roster without having joined")
    return member.joined


def _peer(member: Member) -> Peer:
    joined = joined_of(member)
    return Peer(
        worker=member.worker,
        transport_address=joined.transport_address,
        host=member.hello.host,
        adapter_token=member.hello.adapter_token,
        lockstep_address=joined.lockstep_address,
    )
