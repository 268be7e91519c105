"""What one update cost one worker, as plain numbers."""

from __future__ import annotations

import time

import msgspec


class SendStats(msgspec.Struct, frozen=True):
    """One `send_weights` call of one trainer worker. Seconds are wall time of the caller's wait."""

    stall_s: float
    """From the call to its return: the time the application could not compute."""
    lag: int
    """How many announced versions the slowest live engine had not applied when the call returned."""


class UpdateStats(msgspec.Struct, frozen=True):
    """One applied update on one rollout worker. Seconds are wall time of the caller's wait."""

    stall_s: float
    """From parking in the poll to leaving it; what a poll with `wait_s` slept before does not count."""
    park_s: float
    """Of that, until this worker was ready: meeting the others, `before_apply`, the last open steps."""
    apply_s: float
    """Of that, the rest: until all were ready, and until the parameters were written on all of them (with
    direct staging also the transfer)."""
    lag: int
    """How many newer versions had been announced when the engine began to apply this one."""


class UpdateClock:
    """Measures one poll, from now; one that `slept` from when it was asked, since the caller wanted that."""

    def __init__(self, *, slept: bool) -> None:
        self._slept = slept
        self._begun_s = self._ready_s = time.perf_counter()

    def asked(self) -> None:
        if self._slept:
            self._begun_s, self._slept = time.perf_counter(), False

    def ready(self) -> None:
        self._ready_s = time.perf_counter()

    def stats(self, lag: int) -> UpdateStats:
        now_s = time.perf_counter()
        return UpdateStats(
            stall_s=now_s - self._begun_s,
            park_s=self._ready_s - self._begun_s,
            apply_s=now_s - self._ready_s,
            lag=lag,
        )
