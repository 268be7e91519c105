"""LateWriters: trainers that may still write the parameters although their epoch is over."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from wbridge.ids import WorkerId
from wbridge.transport.base import RemoteSlot
from wbridge.transport.select import Transports

_log = logging.getLogger(__name__)


class LateWriters:
    """Where parameters are written directly, a process that is stopped in the middle goes on some day, and
    writes an old version over whatever is there by then. So nothing is written before that."""

    def __init__(self, worker: WorkerId) -> None:
        self._worker = worker
        self._slots: list[RemoteSlot] = []

    def add(self, slots: Iterable[RemoteSlot]) -> None:
        """These are exposed, and no proof has come that nobody writes them."""
        self._slots += slots

    async def wait_gone(self, transports: Transports) -> None:
        """Return when all have gone on, or have died. Cancelled: to be called again."""
        self.warn()
        while self._slots:
            await transports.withdraw(self._slots[-1])
            self._slots.pop()

    def warn(self) -> None:
        """Say so, if there are any."""
        if self._slots:
            _log.warning(
                "a trainer is stopped while it writes these parameters: let it go on, or end that process",
                extra={"worker": str(self._worker)},
            )
