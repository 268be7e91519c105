"""Outbox: what a worker has to say to the coordinator, kept while no epoch is live."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from wbridge.control.messages import FlowMessage
from wbridge.errors import EndpointClosed, PeerLost


class Outbox:
    """Runs in the loop thread."""

    def __init__(self, post: Callable[..., None]) -> None:
        self._post = post
        self._is_open = False
        self._kept: list[FlowMessage] = []

    def send(self, *messages: FlowMessage) -> None:
        """Send now, or when the epoch is live. Without a coordinator nobody waits for it."""
        if not self._is_open:
            self._kept.extend(messages)
            return
        with contextlib.suppress(PeerLost, EndpointClosed):  # noticed by whoever reads the connection
            self._post(*messages)

    def open(self) -> None:
        """The epoch is live."""
        self._is_open = True
        kept, self._kept = self._kept, []
        if kept:
            self.send(*kept)

    def close(self) -> None:
        """The epoch is over; what is said from now on is kept."""
        self._is_open = False

    def clear(self) -> None:
        """Also what was kept is of an epoch that is over."""
        self._is_open, self._kept = False, []
