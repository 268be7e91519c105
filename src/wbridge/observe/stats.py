"""What one update cost one worker, as plain numbers."""

from __future__ import annotations

import msgspec


class SendStats(msgspec.Struct, frozen=True):
    """One `send_weights` call of one trainer worker. Seconds are wall time of the caller's wait."""

    stall_s: float
    """From the call to its return: the time the application could not compute."""
    snapshot_s: float = 0.0
    nbytes: int = 0
    """Bytes this worker put for earlier calls since the last one, by the transport's own count."""


class UpdateStats(msgspec.Struct, frozen=True):
    """One applied update on one rollout worker, in seconds and bytes."""

    stall_s: float
    """From parking in the poll to leaving it."""
    park_s: float = 0.0
    """Of that, waiting for the other workers of the engine."""
    apply_s: float = 0.0
    """Of that, writing parameters (and, with direct staging, waiting for their bytes)."""
    nbytes: int = 0
