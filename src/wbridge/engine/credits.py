"""CreditSender: the way of the credits back to one writer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import anyio

from wbridge.engine.wire import encode
from wbridge.errors import EndpointClosed, PeerLost
from wbridge.flow.messages import Alive, Credit, Placed, Placement, Unwanted
from wbridge.ids import Epoch
from wbridge.transport.base import Endpoint

PLACEMENTS_PER_MESSAGE: Final = 100
"""Names may be long, and a message has at most 64 KiB."""


class CreditSender:
    """Sends one writer its credits in order, so that a writer that is stuck delays no other's."""

    def __init__(
        self,
        epoch: Epoch,
        endpoint: Endpoint,
        placements: Sequence[Placement] = (),
        *,
        broken: Callable[[], None],
    ) -> None:
        """`placements`: where the parameters lie that this writer writes itself. They go first.

        `broken` is called when nothing reaches the writer any more.
        """
        self._broken = broken
        self._placements = placements
        self._epoch = epoch
        self._endpoint = endpoint
        # Unbounded, bounded by what may be in it: one credit for each piece that has a slot, and a few signs.
        self._credits, self._inbox = anyio.create_memory_object_stream[Credit | Alive | Unwanted](math.inf)
        self._num_queued = 0
        self._is_open = False  # the placements have gone

    def give(self, message: Credit | Alive | Unwanted) -> None:
        """Send a credit, or to another rollout a sign, when all before it has been sent."""
        if self._num_queued or not self._is_open or not self._endpoint.send_now(encode(self._epoch, message)):
            self._num_queued += 1
            self._credits.send_nowait(message)

    async def run(self) -> None:
        """Send until cancelled."""
        with self._credits, self._inbox:
            async for credit in self._inbox:
                await self._send_placements()  # not earlier: the writer may still be in another epoch
                await self._send(credit)
                self._num_queued -= 1

    async def _send_placements(self) -> None:
        placements, self._placements = self._placements, ()
        for start in range(0, len(placements), PLACEMENTS_PER_MESSAGE):
            await self._send(Placed(tuple(placements[start : start + PLACEMENTS_PER_MESSAGE])))
        self._is_open = True

    async def _send(self, message: Credit | Placed | Alive | Unwanted) -> None:
        try:
            await self._endpoint.send(encode(self._epoch, message))
        except (PeerLost, EndpointClosed):
            self._broken()  # of a trainer, the coordinator says what becomes of the ticket without it
