"""WorkerContext: what one worker holds for one epoch; frozen, and blind to the mode it came from."""

from __future__ import annotations

from collections.abc import Mapping

import anyio
import msgspec

from wbridge.config import Config
from wbridge.ids import Epoch, WorkerId
from wbridge.plan.types import WorkerPlan
from wbridge.staging.base import ReceiverStaging, SenderStaging, WriterStaging
from wbridge.staging.relay import RelayStaging
from wbridge.staging.slots import LocalSlots
from wbridge.transport.base import Endpoint, Transport


class WorkerContext(msgspec.Struct, frozen=True):
    """The frozen surroundings of the engine. `endpoints` reach every worker that this one writes to or
    is written by, by name (`str(worker)`)."""

    worker: WorkerId
    epoch: Epoch
    plan: WorkerPlan
    config: Config
    transport: Transport
    endpoints: Mapping[str, Endpoint]
    checksums: frozenset[str]
    """Names of the receivers whose slots carry a checksum."""


class WriterContext(WorkerContext, frozen=True):
    staging: WriterStaging
    gather_slots: Mapping[str, LocalSlots]
    """For each receiver, by name, whose memory is out of reach."""


class SenderContext(WriterContext, frozen=True):
    staging: SenderStaging


class ReceiverContext(WorkerContext, frozen=True):
    staging: ReceiverStaging
    credits_ahead: bool
    """Whether writers get the credits of the next version as soon as the slots are free."""
    relay: RelayContext | None
    """If this worker is in an exchange."""


class RelayContext(WriterContext, frozen=True):
    """The surroundings of a rollout as a writer; `endpoints` reach the other members of its exchange, and
    are the receiver's."""

    staging: RelayStaging


async def close_endpoints(context: WorkerContext) -> None:
    """Close them all at once, since each may take its time. Not to be cancelled."""
    with anyio.CancelScope(shield=True):
        async with anyio.create_task_group() as tasks:
            for endpoint in context.endpoints.values():
                tasks.start_soon(endpoint.aclose)
