"""From a roster of members to what each of them is told: the plan, encoded, and its peers."""

from __future__ import annotations

import hashlib
import logging
import zlib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from wbridge.cache import Cache, sealed, unsealed
from wbridge.config import Config
from wbridge.control.agreement import job_values
from wbridge.control.auth import wbridge_version
from wbridge.control.codec import MAX_FRAME_NBYTES
from wbridge.control.membership import Joined, Member
from wbridge.control.messages import EpochStart, Peer
from wbridge.errors import InternalError, PlanError, ProtocolError
from wbridge.ids import Epoch, WorkerId
from wbridge.plan.build import plan_tables
from wbridge.plan.expand import Expansion
from wbridge.plan.topology import read_topology
from wbridge.plan.types import Plan, WorkerPlan

MAX_PLAN_NBYTES = MAX_FRAME_NBYTES // 2
"""The rest of a frame is left to the peers that travel with a plan."""

_log = logging.getLogger(__name__)


class Roster(msgspec.Struct, frozen=True):
    """The members of an epoch, in rank order."""

    ranks: tuple[Member, ...]
    engines: dict[str, tuple[Member, ...]]

    @property
    def members(self) -> tuple[Member, ...]:
        return self.ranks + tuple(m for engine in self.engines.values() for m in engine)


class Planned(msgspec.Struct, frozen=True):
    """The plan of an epoch as it travels, and for each worker those it has to do with, by index."""

    plan: bytes
    workers: tuple[WorkerId, ...]
    partners: tuple[tuple[int, ...], ...]
    shares_copies: bool
    """Engines pass weights on to each other."""

    def partners_of(self, worker: WorkerId) -> tuple[WorkerId, ...]:
        return tuple(self.workers[k] for k in self.partners[self.workers.index(worker)])


def build_planned(maps: Mapping[WorkerId, Joined], hosts: Mapping[WorkerId, str], config: Config) -> Planned:
    """Plan and encode, or take from the cache what was planned for the same workers.

    Slow, so it runs in a worker thread: up to a second for the largest fleets.

    Raises:
        PlanError, LayoutError, CoverageError: as `build_plan`, or the plan is too large to be sent.
    """
    members = sorted((worker, joined.digest, hosts[worker]) for worker, joined in maps.items())
    settings = config.include, config.slot_nbytes, config.relays, config.topology
    form = wbridge_version(), msgspec.json.schema(Plan)  # another release may plan or store differently
    cache = Cache(Path(config.cache_dir) if config.cache_dir else None)
    file = f"{digest_of(form, members, *settings)}.plan"
    if (known := cache.load(file)) is not None:
        try:
            return msgspec.msgpack.decode(known, type=Planned)
        except msgspec.MsgspecError as exc:
            _log.debug("a plan in the cache is foreign", extra={"file": file, "error": str(exc)})
    tables = {worker: joined.table for worker, joined in maps.items()}
    plan = plan_tables(tables, hosts, config, read_topology(config.topology))
    if len(data := packed(plan)) > MAX_PLAN_NBYTES:
        raise PlanError(
            f"the plan of {len(plan.workers)} workers takes {len(data)} bytes, at most {MAX_PLAN_NBYTES} can"
            " be sent; its tensors have too few layouts in common: leave some out with `include`"
        )
    planned = planned_of(plan, data)
    cache.store(file, msgspec.msgpack.encode(planned))
    return planned


def digest_of(*inputs: object) -> str:
    """Return a digest of all that a plan depends on."""
    return hashlib.sha256(msgspec.msgpack.encode(inputs, order="sorted")).hexdigest()


def stored(plan: Plan) -> bytes:
    """Return a plan as a file of the cache has it."""
    return sealed(msgspec.msgpack.encode(planned_of(plan, packed(plan))))


def planned_of(plan: Plan, data: bytes) -> Planned:
    """Return what the coordinator keeps of a plan; `data` is the plan packed."""
    engines = ({plan.workers[k].group for k in exchange.members} for exchange in plan.exchanges)
    return Planned(data, plan.workers, partners_of(plan), any(len(those) > 1 for those in engines))


def restored(data: bytes) -> Plan:
    """Return the plan of a file of the cache.

    Raises:
        ProtocolError: this is no such file, it is damaged, or another release wrote it.
    """
    content = unsealed(data)
    if content is None:
        raise ProtocolError("not a saved plan, or damaged; save it again")
    try:
        return unpacked(msgspec.msgpack.decode(content, type=Planned).plan)
    except (zlib.error, msgspec.MsgspecError) as exc:
        raise ProtocolError(f"the plan of another release: {exc}; plan again with this one") from exc


def packed(plan: Plan) -> bytes:
    """Return what `unpacked_slice` takes; names repeat, so that little is left of them."""
    return zlib.compress(msgspec.msgpack.encode(plan), level=1)


def unpacked(data: bytes) -> Plan:
    """Return what was packed; `zlib.error` or `MsgspecError` if it was nothing of that kind."""
    return msgspec.msgpack.decode(zlib.decompress(data), type=Plan)


def unpacked_slice(data: bytes, worker: WorkerId) -> WorkerPlan:
    """Return the part of a packed plan that concerns `worker`. Slow, as `build_planned`.

    Raises:
        ProtocolError: this is no plan.
        PlanError: the plan does not know this worker.
    """
    try:
        plan = unpacked(data)
    except (zlib.error, msgspec.MsgspecError) as exc:
        raise ProtocolError(
            f"{worker} got a plan that it cannot read: {exc}; run one release everywhere"
        ) from exc
    return Expansion(plan).slice_for(worker)


def partners_of(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Return for each worker its own group, and those it writes to or gets something from."""
    groups: dict[tuple[str, str], list[int]] = {}
    for index, worker in enumerate(plan.workers):
        groups.setdefault((worker.role, worker.group), []).append(index)
    found = [set(groups[worker.role, worker.group]) for worker in plan.workers]
    for writers, receivers in Expansion(plan).pairs():
        for writer in writers:
            found[writer].update(receivers)
        for receiver in receivers:
            found[receiver].update(writers)
    return tuple(tuple(sorted(own)) for own in found)


def epoch_start(
    epoch: Epoch, worker: WorkerId, roster: Roster, planned: Planned, config: Config
) -> EpochStart:
    """Return what `worker` is told: `peers` are its own group and those its plan names, not everybody."""
    by_worker = {member.worker: member for member in roster.members}
    return EpochStart(
        epoch=epoch,
        plan=planned.plan,
        peers=tuple(_peer(by_worker[partner]) for partner in planned.partners_of(worker)),
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
