"""Build the two staging objects of a worker: the only thing in which the modes differ."""

from __future__ import annotations

from collections.abc import Sequence

from wbridge.config import Config, Staging
from wbridge.device.base import Device
from wbridge.device.copy import Tensors
from wbridge.plan.schedule import ring_slots
from wbridge.plan.types import Group, Piece
from wbridge.staging.base import ReceiverStaging, SenderStaging
from wbridge.staging.direct import DirectReceiver, DirectSender
from wbridge.staging.pinned import PinnedReceiver, PinnedSender


def open_sender_staging(
    kind: Staging, config: Config, device: Device, parameters: Tensors, pieces: Sequence[Piece]
) -> SenderStaging:
    """Allocate and compile for all `pieces` that this worker writes, out of any of their groups."""
    if kind == "direct":
        return DirectSender(device, parameters, pieces, local_slots=config.local_slots)
    return PinnedSender(
        device,
        parameters,
        pieces,
        local_slots=config.local_slots,
        snapshot_versions=config.snapshot_versions,
    )


def open_receiver_staging(
    kind: Staging, config: Config, device: Device, targets: Tensors, groups: Sequence[Group]
) -> ReceiverStaging:
    """Allocate a ring for `groups`, all of this worker, and compile the copies into `targets`."""
    num_slots = ring_slots(config, len(groups), kind)
    receiver = DirectReceiver if kind == "direct" else PinnedReceiver
    return receiver(device, targets, groups, num_slots=num_slots)
