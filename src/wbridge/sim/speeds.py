"""Speeds: what the simulator is told of the machines, beside the links of the topology."""

from __future__ import annotations

import msgspec

from wbridge.errors import ConfigError


class Speeds(msgspec.Struct, frozen=True, kw_only=True):
    """How fast things are; all but the NICs, which the topology has."""

    latency_s: float = 10e-6
    """From one host to another, one way."""
    local_latency_s: float = 5e-6
    """From one process to another on the same host."""
    message_s: float = 10e-6
    """What a put, a credit or a notification costs each of its ends, one after the other in one worker."""
    local_gb_s: float = 450.0
    """Of each worker, in each direction, to others on its host."""
    copy_gb_s: float = 0.0
    """At which a worker gathers or scatters, and beside that reads what it passes on; 0: no cost."""
    efficiency: float = 1.0
    """The part of a NIC's bandwidth that payload gets."""
    resolution_s: float = 0.0
    """Flows that begin or end within this time are taken together; 0: exact."""

    def __post_init__(self) -> None:
        for name in ("latency_s", "local_latency_s", "message_s", "resolution_s", "copy_gb_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be 0 or more")
        for name in ("local_gb_s", "efficiency"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be positive")
        if self.efficiency > 1:
            raise ConfigError(f"efficiency = {self.efficiency}: must be at most 1")
