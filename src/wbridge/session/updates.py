"""What the application sees of an update: `Update`, `RolloutHooks`."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Protocol

import msgspec

from wbridge.errors import UpdateAborted
from wbridge.ids import Epoch, WorkerId
from wbridge.observe.stats import UpdateStats

Metadata = Mapping[str, object]
"""A msgpack-able mapping of at most 64 KiB."""

MAX_METADATA_NBYTES = 64 * 1024


class Update(msgspec.Struct, frozen=True):
    """A version that is applied on every worker of this engine, at the same poll index."""

    version: int
    epoch: Epoch
    ticket: int
    metadata: Metadata
    stats: UpdateStats


class Serving(msgspec.Struct, frozen=True):
    """What the live weights are. Each update and each taint makes a new one, told apart by identity."""

    version: int | None = None
    """None before the first update, and while the weights are tainted."""
    ticket: int | None = None
    tainted: str = ""
    """Why the weights are neither old nor new."""

    def usable(self, worker: WorkerId) -> int | None:
        """Return the version for a step.

        Raises:
            UpdateAborted: the weights are tainted.
        """
        if self.tainted:
            raise UpdateAborted(
                f"{worker}: the weights are tainted: {self.tainted}; poll until a whole version lands"
            )
        return self.version


class RolloutHooks(Protocol):
    """What an inference server does around an update. Runs in the caller's context, inside the poll.

    Both may be async in the async adapter. Order on each worker: `before_apply`, open steps end,
    parameters change, `after_apply`.
    """

    def before_apply(self) -> Awaitable[None] | None:
        """Runs when this worker has parked, before any parameter changes: pause, drain, flush caches.

        Raising refuses: the whole engine is released on its old version and the poll raises the error.
        """
        ...

    def after_apply(self, update: Update | None) -> Awaitable[None] | None:
        """Runs after the engine has the new version, or with None after a release: resume.

        It cannot refuse any more; an error is raised by the poll, and the version stays.
        """
        ...
