"""Builds the frozen context of one worker for one epoch. The only place that turns a mode into objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from wbridge.config import Config
from wbridge.control.messages import EpochStart, Peer
from wbridge.device.base import Device, MemoryKind
from wbridge.device.sharing import arena_of
from wbridge.engine.context import ReceiverContext, RelayContext, SenderContext
from wbridge.errors import ProtocolError
from wbridge.ids import WorkerId
from wbridge.plan.routes import partners_of
from wbridge.plan.schedule import ring_slots
from wbridge.plan.types import WorkerPlan
from wbridge.staging.base import ReceiverStaging, SenderStaging
from wbridge.staging.direct import DirectReceiver, DirectSender
from wbridge.staging.in_place import InPlaceReceiver
from wbridge.staging.pinned import PinnedReceiver, PinnedSender
from wbridge.staging.relay import RelayStaging
from wbridge.staging.runs import land_in_runs
from wbridge.staging.slots import LocalSlots
from wbridge.transport.base import Endpoint
from wbridge.transport.select import Transports

Tensors = Mapping[str, Any]  # torch tensors; torch stays out of this layer
T = TypeVar("T")


async def open_sender_context(
    start: EpochStart,
    plan: WorkerPlan,
    config: Config,
    *,
    transport: Transports,
    device: Device,
    tensors: Tensors,
) -> SenderContext:
    """Connect to every receiver of this worker and allocate its gather slots and snapshots."""
    peers = _peers(start, {o.receiver for o in plan.outgoing})
    endpoints = await _connect(transport, peers)
    staging, gather_slots = await _build(
        endpoints, lambda: _sender_memory(config, device, tensors, plan, endpoints)
    )
    return SenderContext(
        worker=plan.worker,
        epoch=start.epoch,
        plan=plan,
        config=config,
        transport=transport,
        staging=staging,
        gather_slots=gather_slots,
        checksums=_checksummed(config, transport, peers) | _members(plan),
        endpoints=endpoints,
    )


async def open_receiver_context(
    start: EpochStart,
    plan: WorkerPlan,
    config: Config,
    *,
    transport: Transports,
    device: Device,
    tensors: Tensors,
) -> ReceiverContext:
    """Connect to every writer of this worker, for its credits, and allocate its ring."""
    partners = _partners(plan)
    peers = _peers(start, {p.writer for group in plan.incoming for p in group.pieces} | partners.keys())
    endpoints = await _connect(transport, peers)
    # Slots from which others are written lie in host memory.
    is_plain = not partners and config.checksum != "on"
    is_local = is_plain and all(e.fill for e in endpoints.values())
    takes_runs = is_plain and all(e.fill or e.put_runs for e in endpoints.values())
    is_near = is_local and all(
        transport.reaches_slots_on_device(peer.transport_address, endpoints[str(peer.worker)])
        for peer in peers
    )

    def build() -> tuple[ReceiverStaging, RelayContext | None]:
        staging = _receiver_staging(
            config, device, tensors, plan, is_local=is_local, is_near=is_near, takes_runs=takes_runs
        )
        try:
            return staging, _relay_context(start, plan, config, transport, device, endpoints, partners)
        except BaseException:  # whatever it is, no stream stays open; raised again
            staging.close()
            raise

    staging, relay = await _build(endpoints, build)
    return ReceiverContext(
        worker=plan.worker,
        epoch=start.epoch,
        plan=plan,
        config=config,
        transport=transport,
        staging=staging,
        credits_ahead=is_local and config.effective_delivery == "every" and not staging.takes_parked,
        relay=relay,
        checksums=frozenset(),
        endpoints=endpoints,
    )


def _relay_context(
    start: EpochStart,
    plan: WorkerPlan,
    config: Config,
    transport: Transports,
    device: Device,
    endpoints: Mapping[str, Endpoint],
    partners: Mapping[WorkerId, int],
) -> RelayContext | None:
    """The surroundings of a rollout that passes on what it gets, if it does."""
    if not partners:
        return None
    largest = {str(partner): nbytes for partner, nbytes in sorted(partners.items())}
    staging = RelayStaging(device, local_slots=config.local_slots)
    try:
        far = [name for name in largest if endpoints[name].fill is None]
        gather_slots = {name: staging.open_slots(largest[name]) for name in far}
    except BaseException:  # whatever it is, no stream stays open; raised again
        staging.close()
        raise
    return RelayContext(
        worker=plan.worker,
        epoch=start.epoch,
        plan=plan,
        config=config,
        transport=transport,
        staging=staging,
        gather_slots=gather_slots,
        checksums=frozenset(largest),
        endpoints={name: endpoints[name] for name in largest},
    )


def _partners(plan: WorkerPlan) -> dict[WorkerId, int]:
    """Return with whom a rollout exchanges pieces, and the size of the largest of them."""
    found: dict[WorkerId, int] = {}
    for exchange in plan.exchanges:
        numbers = exchange.numbers[exchange.members.index(plan.worker)]
        largest = max(piece.nbytes for number in numbers for piece in plan.incoming[number].pieces)
        for partner in partners_of(exchange, plan.worker):
            found[partner] = max(found.get(partner, 0), largest)
    return found


def _members(plan: WorkerPlan) -> frozenset[str]:
    """Who passes on what it gets, so that it has to be right."""
    return frozenset(str(member) for exchange in plan.exchanges for member in exchange.members)


def _sender_memory(
    config: Config, device: Device, tensors: Tensors, plan: WorkerPlan, endpoints: Mapping[str, Endpoint]
) -> tuple[SenderStaging, dict[str, LocalSlots]]:
    """The staging, and gather slots for each receiver whose memory is out of reach."""
    largest = {name: 0 for name, endpoint in endpoints.items() if endpoint.fill is None}
    for outgoing in plan.outgoing:
        if (name := str(outgoing.receiver)) in largest:
            largest[name] = max(largest[name], outgoing.piece.nbytes)
    staging = _sender_staging(config, device, tensors, plan)
    try:
        return staging, {name: staging.open_slots(nbytes) for name, nbytes in largest.items()}
    except BaseException:  # whatever it is, no stream stays open; raised again
        staging.close()
        raise


def _sender_staging(config: Config, device: Device, tensors: Tensors, plan: WorkerPlan) -> SenderStaging:
    pieces = [outgoing.piece for outgoing in plan.outgoing]
    if config.mode.sender_staging == "direct":
        return DirectSender(device, tensors, pieces, local_slots=config.local_slots)
    return PinnedSender(
        device,
        tensors,
        pieces,
        local_slots=config.local_slots,
        snapshot_versions=config.snapshot_versions,
    )


def _receiver_staging(
    config: Config,
    device: Device,
    tensors: Tensors,
    plan: WorkerPlan,
    *,
    is_local: bool,
    is_near: bool,
    takes_runs: bool,
) -> ReceiverStaging:
    """`is_local`: all writers can write memory of this process; `is_near`: of its device too; `takes_runs`:
    they can put runs of bytes into any of it."""
    policy = config.mode.receiver_staging
    num_slots = ring_slots(config, len(plan.incoming), policy, passes_on=bool(plan.exchanges))
    if policy == "pinned":
        return PinnedReceiver(device, tensors, plan.incoming, num_slots=num_slots)
    pieces = [piece for group in plan.incoming for piece in group.pieces]
    targets = [tensors[transfer.target_parameter] for piece in pieces for transfer in piece.transfers]
    if not is_local:
        is_local = takes_runs and land_in_runs(plan.incoming, tensors)
    arena = arena_of(targets) if is_local else None
    # Tensors that are assembled for a loader are the host's, which reads no slots on a GPU.
    is_near = is_near and all(str(target.device) == device.name for target in targets)
    if arena is not None and (is_near or arena.is_host):
        return InPlaceReceiver(arena, tensors, plan.incoming)
    kind: MemoryKind = "device" if is_near else "pinned"
    return DirectReceiver(
        device,
        tensors,
        plan.incoming,
        num_slots=num_slots,
        takes_parked=config.takes_parked(len(plan.incoming)),
        kind=kind,
    )


def _peers(start: EpochStart, workers: Iterable[WorkerId]) -> tuple[Peer, ...]:
    known = {peer.worker: peer for peer in start.peers}
    missing = sorted(str(worker) for worker in workers if worker not in known)
    if missing:
        raise ProtocolError(
            f"epoch {start.epoch}: the plan names {missing[0]}, whose address the coordinator left out"
        )
    return tuple(known[worker] for worker in sorted(workers))


async def _connect(transport: Transports, peers: Iterable[Peer]) -> dict[str, Endpoint]:
    endpoints: dict[str, Endpoint] = {}
    try:
        for peer in peers:
            name = str(peer.worker)
            endpoints[name] = await transport.connect(peer.transport_address, name)
    except BaseException:  # whatever it is, no endpoint stays open; raised again
        await _close(endpoints)
        raise
    return endpoints


async def _build(endpoints: Mapping[str, Endpoint], build: Callable[[], T]) -> T:
    """Allocate in a worker thread. Nothing may wait between this and the start of what owns the result."""
    try:
        return await anyio.to_thread.run_sync(build)
    except BaseException:  # whatever it is, no endpoint stays open; raised again
        await _close(endpoints)
        raise


async def _close(endpoints: Mapping[str, Endpoint]) -> None:
    with anyio.CancelScope(shield=True):
        for endpoint in endpoints.values():
            await endpoint.aclose()


def _checksummed(config: Config, transport: Transports, peers: Iterable[Peer]) -> frozenset[str]:
    return frozenset(
        str(peer.worker)
        for peer in peers
        if config.checksum == "on"
        or (config.checksum == "auto" and transport.link_to(peer.transport_address) == "network")
    )
