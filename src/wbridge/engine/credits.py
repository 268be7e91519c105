"""CreditSender: the way of the credits back to one writer."""

from __future__ import annotations

import math

import anyio

from wbridge.engine.wire import encode
from wbridge.errors import EndpointClosed, PeerLost
from wbridge.flow.messages import Credit
from wbridge.ids import Epoch
from wbridge.transport.base import Endpoint


class CreditSender:
    """Sends one writer its credits in order, so that a writer that is stuck delays no other's."""

    def __init__(self, epoch: Epoch, endpoint: Endpoint) -> None:
        self._epoch = epoch
        self._endpoint = endpoint
        # Unbounded, bounded by what may be in it: one credit for each piece that has a slot.
        self._credits, self._inbox = anyio.create_memory_object_stream[Credit](math.inf)

    def give(self, credit: Credit) -> None:
        self._credits.send_nowait(credit)

    async def run(self) -> None:
        """Send until cancelled."""
        with self._credits, self._inbox:
            async for credit in self._inbox:
                try:
                    await self._endpoint.send(encode(self._epoch, credit))
                except (PeerLost, EndpointClosed):
                    continue  # the coordinator says what becomes of the ticket without this writer
