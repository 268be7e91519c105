"""Builds the frozen context of one worker for one epoch. The only place that turns a mode into objects."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

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

SHORT_NBYTES = 4 * 2**20
"""A version of so many bytes for one worker, or fewer, is sooner in its parameters through a slot that need
not wait for the poll than if it is written straight there."""

_log = logging.getLogger(__name__)


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
    endpoints = await _connect(transport, peers, config)
    checked = frozenset(str(peer.worker) for peer in peers if _is_checksummed(config, transport, peer))
    checksums = checked | _members(plan)
    staging, gather_slots = await _build(
        endpoints, lambda: _sender_memory(config, device, tensors, plan, endpoints, checksums)
    )
    return SenderContext(
        worker=plan.worker,
        epoch=start.epoch,
        plan=plan,
        config=config,
        transport=transport,
        staging=staging,
        gather_slots=gather_slots,
        checksums=checksums,
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
    endpoints = await _connect(transport, peers, config)
    writers = _writers(config, transport, peers, endpoints, pass_on=bool(partners))

    def build() -> tuple[ReceiverStaging, RelayContext | None]:
        staging = _receiver_staging(config, device, tensors, plan, writers)
        try:
            return staging, _relay_context(start, plan, config, transport, device, endpoints, partners)
        except BaseException:  # whatever it is, no stream stays open; raised again
            staging.close()
            raise

    staging, relay = await _build(endpoints, build)
    _log.info(
        "slots are open",
        extra={
            "worker": str(plan.worker),
            "epoch": start.epoch,
            "memory": sorted({buffer.kind for buffer in staging.buffers}),
            "why_on_host": writers.why_on_host,
        },
    )
    return ReceiverContext(
        worker=plan.worker,
        epoch=start.epoch,
        plan=plan,
        config=config,
        transport=transport,
        staging=staging,
        credits_ahead=writers.all_map and config.effective_delivery == "every" and not staging.takes_parked,
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
    config: Config,
    device: Device,
    tensors: Tensors,
    plan: WorkerPlan,
    endpoints: Mapping[str, Endpoint],
    checksums: frozenset[str],
) -> tuple[SenderStaging, dict[str, LocalSlots]]:
    """The staging, and gather slots for each receiver whose memory is out of reach: on the GPU if UCX takes
    bytes from there and the host computes no checksum of them."""
    on_gpu = {name: e.put_from_gpu is not None and name not in checksums for name, e in endpoints.items()}
    largest = {name: 0 for name, endpoint in endpoints.items() if endpoint.fill is None}
    for outgoing in plan.outgoing:
        if (name := str(outgoing.receiver)) in largest:
            largest[name] = max(largest[name], outgoing.piece.nbytes)
    staging = _sender_staging(config, device, tensors, plan)
    try:
        return staging, {name: staging.open_slots(n, on_gpu=on_gpu[name]) for name, n in largest.items()}
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


class Writers(NamedTuple):
    """What the writers of a worker can do."""

    all_map: bool
    """Each writes memory of this process as it writes its own."""
    some_map: bool
    all_put_runs: bool
    """Each does that, or puts runs of bytes into any of it."""
    why_on_host: str | None
    """Why slots cannot lie in the device's memory; None: all writers write it."""


def _writers(
    config: Config,
    transport: Transports,
    peers: Iterable[Peer],
    endpoints: Mapping[str, Endpoint],
    *,
    pass_on: bool,
) -> Writers:
    """Slots from which others are written (`pass_on`) lie in host memory, and so do those with checksums."""
    is_plain = not pass_on and config.checksum != "on"
    why = "they are passed on to other rollouts" if pass_on else None
    return Writers(
        all_map=is_plain and all(e.fill for e in endpoints.values()),
        some_map=any(e.fill for e in endpoints.values()),
        all_put_runs=is_plain and all(e.fill or e.put_runs for e in endpoints.values()),
        why_on_host=why or _why_on_host(config, transport, peers, endpoints),
    )


def _why_on_host(
    config: Config, transport: Transports, peers: Iterable[Peer], endpoints: Mapping[str, Endpoint]
) -> str | None:
    if config.mode.receiver_staging == "pinned":
        return f"mode={config.mode.value!r} lets a version wait there"
    for peer in peers:
        if _is_checksummed(config, transport, peer):
            return f"the host computes checksums of what comes from {peer.worker}: set checksum='off'"
        why = transport.why_not_on_device(peer.transport_address, endpoints[str(peer.worker)])
        if why is not None:
            return why
    return None


def _receiver_staging(
    config: Config, device: Device, tensors: Tensors, plan: WorkerPlan, writers: Writers
) -> ReceiverStaging:
    policy = config.mode.receiver_staging
    num_slots = ring_slots(config, len(plan.incoming), policy, passes_on=bool(plan.exchanges))
    if policy == "pinned":
        return PinnedReceiver(device, tensors, plan.incoming, num_slots=num_slots)
    pieces = [piece for group in plan.incoming for piece in group.pieces]
    takes_parked = config.takes_parked(len(plan.incoming))
    can_wait = not takes_parked and sum(piece.nbytes for piece in pieces) <= SHORT_NBYTES
    targets = [tensors[transfer.target_parameter] for piece in pieces for transfer in piece.transfers]
    in_place = writers.all_map or (writers.all_put_runs and land_in_runs(plan.incoming, tensors))
    arena = arena_of(targets) if in_place and not can_wait else None
    # Tensors that are assembled for a loader are the host's, which reads no slots on a GPU.
    is_near = writers.why_on_host is None and all(str(target.device) == device.name for target in targets)
    if arena is not None and (arena.is_host or (is_near and writers.all_map)):
        return InPlaceReceiver(arena, tensors, plan.incoming)
    kind: MemoryKind = "device" if is_near else "pinned"
    return DirectReceiver(
        device,
        tensors,
        plan.incoming,
        num_slots=num_slots,
        takes_parked=takes_parked,
        kind=kind,
        shared=writers.some_map or not is_near,
    )


def _peers(start: EpochStart, workers: Iterable[WorkerId]) -> tuple[Peer, ...]:
    known = {peer.worker: peer for peer in start.peers}
    missing = sorted(str(worker) for worker in workers if worker not in known)
    if missing:
        raise ProtocolError(
            f"epoch {start.epoch}: the plan names {missing[0]}, whose address the coordinator left out"
        )
    return tuple(known[worker] for worker in sorted(workers))


async def _connect(transport: Transports, peers: Iterable[Peer], config: Config) -> dict[str, Endpoint]:
    prefers_gpu = config.mode.receiver_staging == "direct" and config.checksum != "on"
    endpoints: dict[str, Endpoint] = {}
    try:
        for peer in peers:
            name = str(peer.worker)
            endpoints[name] = await transport.connect(peer.transport_address, name, prefers_gpu=prefers_gpu)
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


def _is_checksummed(config: Config, transport: Transports, peer: Peer) -> bool:
    """Whether what passes between this worker and the peer carries checksums."""
    if config.checksum == "auto":
        return transport.link_to(peer.transport_address) == "network"
    return config.checksum == "on"
