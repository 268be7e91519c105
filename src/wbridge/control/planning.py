"""From a roster of members to what each of them is told: the plan, encoded, and its peers."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import msgspec

from wbridge.config import Config
from wbridge.control.agreement import job_values
from wbridge.control.membership import Joined, Member
from wbridge.control.messages import EpochStart, Peer
from wbridge.errors import InternalError, ProtocolError
from wbridge.ids import Epoch, WorkerId
from wbridge.plan.build import plan_tables
from wbridge.plan.expand import Expansion
from wbridge.plan.types import Plan, WorkerPlan


class Roster(msgspec.Struct, frozen=True):
    """The members of an epoch, in rank order."""

    ranks: tuple[Member, ...]
    engines: dict[str, tuple[Member, ...]]

    @property
    def members(self) -> tuple[Member, ...]:
        return self.ranks + tuple(m for engine in self.engines.values() for m in engine)


class Planned(msgspec.Struct, frozen=True):
    """The plan of an epoch as it travels, and for each worker those it has to do with."""

    plan: bytes
    partners: dict[WorkerId, tuple[WorkerId, ...]]


def build_planned(maps: Mapping[WorkerId, Joined], hosts: Mapping[WorkerId, str], config: Config) -> Planned:
    """Plan and encode. Pure and slow: seconds for the largest fleets, so it runs in a worker thread.

    Raises:
        PlanError, LayoutError, CoverageError: as `build_plan`.
    """
    plan = plan_tables({worker: joined.table for worker, joined in maps.items()}, hosts, config)
    return Planned(packed(plan), partners_of(plan))


def packed(plan: Plan) -> bytes:
    """Return what `unpacked_slice` takes; names repeat, so that little is left of them."""
    return zlib.compress(msgspec.msgpack.encode(plan), level=1)


def unpacked_slice(data: bytes, worker: WorkerId) -> WorkerPlan:
    """Return the part of a packed plan that concerns `worker`. Slow, as `build_planned`.

    Raises:
        ProtocolError: this is no plan.
        PlanError: the plan does not know this worker.
    """
    try:
        plan = msgspec.msgpack.decode(zlib.decompress(data), type=Plan)
    except (zlib.error, msgspec.MsgspecError) as exc:
        raise ProtocolError(
            f"{worker} got a plan that it cannot read: {exc}; run one release everywhere"
        ) from exc
    return Expansion(plan).slice_for(worker)


def partners_of(plan: Plan) -> dict[WorkerId, tuple[WorkerId, ...]]:
    """Return for each worker its own group, and those it writes to or gets something from."""
    groups: dict[tuple[str, str], list[WorkerId]] = {}
    for worker in plan.workers:
        groups.setdefault((worker.role, worker.group), []).append(worker)
    others: dict[WorkerId, set[WorkerId]] = {worker: set() for worker in plan.workers}
    for writers, receivers in Expansion(plan).pairs():
        for writer in writers:
            others[plan.workers[writer]].update(plan.workers[k] for k in receivers)
        for receiver in receivers:
            others[plan.workers[receiver]].update(plan.workers[k] for k in writers)
    return {
        worker: tuple(sorted({*groups[worker.role, worker.group], *others[worker]}))
        for worker in plan.workers
    }


def epoch_start(
    epoch: Epoch, worker: WorkerId, roster: Roster, planned: Planned, config: Config
) -> EpochStart:
    """Return what `worker` is told: `peers` are its own group and those its plan names, not everybody."""
    by_worker = {member.worker: member for member in roster.members}
    return EpochStart(
        epoch=epoch,
        plan=planned.plan,
        peers=tuple(_peer(by_worker[partner]) for partner in planned.partners[worker]),
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
