"""Which versions served a request: a snapshot taken with it, and spans when an update lands inside it."""

from __future__ import annotations

import functools
import threading

import msgspec

from wbridge.errors import ConfigError
from wbridge.session.rollout import Rollout
from wbridge.session.steps import Step


class VersionSpan(msgspec.Struct, frozen=True):
    """A part of a request that was computed with the same weights."""

    version: int | None
    """None: the weights had no version yet, or were tainted."""
    ticket: int | None
    """Tells two updates with the same version apart."""
    count: int
    """How much was computed, in the units that `advance` was given."""


class ServedRequest:
    """One request of an inference server, and the versions that serve it. Any thread may use it.

    It costs nothing between two calls: the version is looked at when the request advances.
    """

    def __init__(self, rollout: Rollout) -> None:
        self._rollout = rollout
        self._lock = threading.Lock()
        self._past: list[VersionSpan] = []
        self._serving = rollout.serving
        self._count = 0
        self.version: int | None = self._serving.version
        """The version of the weights when the request was made."""

    def advance(self, count: int = 1) -> None:
        """Note that `count` units (tokens, say) were computed. Call it inside the step that computed them:
        there the version cannot change.

        Raises:
            ConfigError: `count` is negative.
        """
        if count < 0:
            raise ConfigError(f"advance({count}): a request does not take back what it has computed")
        with self._lock:
            self._look()
            self._count += count

    def step(self, count: int = 1) -> Step:
        """Mark a forward pass as `ReceiverAdapter.step` does; one that succeeds advances this request."""
        return self._rollout.step(functools.partial(self.advance, count))

    @property
    def spans(self) -> tuple[VersionSpan, ...]:
        """What was computed so far, oldest first; while the weights are tainted, ends with a span of None."""
        with self._lock:
            self._look()
            if self._count or self._serving.tainted:
                return (*self._past, self._span())
            return tuple(self._past)

    def _look(self) -> None:
        """Begin another span if the weights are no longer those of the current one."""
        serving = self._rollout.serving
        if serving is self._serving:
            return
        if self._count:
            self._past.append(self._span())
        self._serving, self._count = serving, 0

    def _span(self) -> VersionSpan:
        return VersionSpan(self._serving.version, self._serving.ticket, self._count)
