"""What drives a UCX worker: the contract of its two implementations, and what they hand out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, Protocol

import anyio

from wbridge.errors import PeerLost

FRAME_NBYTES: Final = 66 * 1024
"""The largest control frame: a message of 64 KiB and its header."""
FRAME_TAG: Final = 1
Kind = Literal["host", "cuda"]
"""Whose memory it is, by UCX's names."""
EAGER_NBYTES: Final = "128k"
"""Frames stay below this, so that none waits for its sender; longer puts go straight into their slot."""


class Transfer:
    """One send, receive or put; holds its memory until UCX has let go of it."""

    def __init__(self, memory: object, then: Callable[[Transfer], None]) -> None:
        self.memory: object = memory
        self.stopped: anyio.Event = anyio.Event()
        self.error: Exception | None = None
        self._then = then

    def settle(self, error: Exception | None) -> None:
        self.error = self.error or error
        self.memory = None
        self.stopped.set()
        self._then(self)

    def forsake(self) -> None:
        """Let those who wait go on: the peer is gone. UCX may still hold the memory, so it is kept."""
        self.error = self.error or ConnectionResetError("the peer is gone")
        self.stopped.set()

    def raise_if_failed(self, peer: str) -> None:
        if self.error is not None:
            raise PeerLost(
                f"transfer with {peer} failed: {self.error!r}; reconnect, or go on without it"
            ) from self.error


class Route:
    """The way to one peer. It ends with its worker."""

    def __init__(self, ucx: Any) -> None:
        self.ucx = ucx  # an endpoint of the untyped bindings, or a number


class Worker(Protocol):
    """Sends and receives for the loop that opened it; received frames are reported to it in order."""

    @property
    def address(self) -> bytes: ...

    def open_route(self, address: bytes, on_error: Callable[[], None] | None) -> Route:
        """Connect to the worker at `address`.

        With `on_error` UCX watches the connection, and for that does without shared memory.

        Raises:
            PeerLost: UCX finds no way there.
        """
        ...

    def send_frame(self, route: Route, frame: bytes, then: Callable[[Transfer], None]) -> None:
        """Send without waiting: a frame is copied away at once, or held until it is."""
        ...

    def send(self, route: Route, memory: memoryview, tag: int, then: Callable[[Transfer], None]) -> Transfer:
        """Send `memory`; `then` is called when it is free of UCX."""
        ...

    def receive(self, memory: memoryview, tag: int, then: Callable[[Transfer], None]) -> Transfer:
        """Receive the one message with this tag; `then` is called when the memory is free of UCX."""
        ...

    def drive(self) -> None:
        """Handle what has arrived, and of a peer of this host that has died, all that it sent."""
        ...

    def close(self) -> None:
        """End all transfers and let UCX go. Idempotent."""
        ...
