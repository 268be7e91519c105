"""The transport contract: `put` bytes into a slot that a peer exposed, then notify it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol, TypeAlias

import msgspec
from anyio.abc import ObjectReceiveStream

from wbridge.device.base import Buffer, PeerMemory
from wbridge.device.memory import ExportedMemory
from wbridge.device.runs import Runs
from wbridge.errors import ProtocolError


class RemoteSlot(msgspec.Struct, frozen=True):
    """A byte range that a receiver exposed for exactly one put; travels inside a credit."""

    token: bytes
    nbytes: int


class Message(msgspec.Struct, frozen=True):
    """Something that arrived: a peer's `send`, or the notification of a put whose bytes are visible."""

    peer: str
    payload: bytes


class Window(NamedTuple):
    """A slot of the peer that this process can write: `nbytes` of `memory` from `offset`.

    All windows into the same memory give the same `memory` object.
    """

    memory: PeerMemory
    offset: int
    nbytes: int

    @property
    def view(self) -> memoryview:
        """The bytes, of a slot in the host's memory.

        Raises:
            ProtocolError: it is on a GPU.
        """
        if isinstance(self.memory, ExportedMemory):
            raise ProtocolError("a slot on a GPU was asked for its bytes; please report it")
        return self.memory[self.offset : self.offset + self.nbytes]


WriteInPlace: TypeAlias = Callable[[Window], Awaitable[bytes]]
"""Writes all of a window and returns the notification. It leaves the memory alone once it has ended, however
it ends."""


Fill: TypeAlias = Callable[["RemoteSlot", WriteInPlace], Awaitable[None]]


PutRuns: TypeAlias = Callable[["RemoteSlot", Runs, bytes], Awaitable[None]]


Put: TypeAlias = Callable[[memoryview, "RemoteSlot", bytes], Awaitable[None]]


class Endpoint(Protocol):
    """One direction of a pair: what this process may do to one peer."""

    @property
    def peer(self) -> str:
        """The name of the other side."""
        ...

    @property
    def fill(self) -> Fill | None:
        """Like `put`, but the function brings the bytes into the peer's own memory, without a copy here
        first. None: that memory is out of reach."""
        ...

    @property
    def put_runs(self) -> PutRuns | None:
        """Like `put`, from many places into the whole buffer that the slot is a part of, where the peer is on
        this host. None: it takes bytes only as they lie in a slot."""
        ...

    @property
    def put_from_gpu(self) -> Put | None:
        """Like `put`, from the `addresses` of memory of this worker's GPU. Both workers then have slots there
        that the other one writes. None: it takes the host's memory only, and reaches no other."""
        ...

    async def put(self, source: memoryview, remote: RemoteSlot, notify: bytes) -> None:
        """Write all of `source` into `remote`; return when `source` may be reused.

        The bytes are visible at the receiver before `notify` appears in its inbox.
        Cancelled: the receiver may hold some bytes and gets no notification; `source` is borrowed
        until `flush` or `aclose` returns.

        Raises:
            PeerLost: the peer is gone.
            EndpointClosed: this side closed the endpoint.
        """
        ...

    async def send(self, payload: bytes) -> None:
        """Send a small message (at most 64 KiB); messages of one endpoint arrive in order.

        A put's notification counts as a message sent when the put completes.
        """
        ...

    def send_now(self, payload: bytes) -> bool:
        """Like `send`, if nothing has to be waited for. False: nothing was sent."""
        ...

    async def flush(self) -> None:
        """Return when no put of this endpoint, finished or cancelled, can touch memory on either side.

        At once after `aclose`.

        Raises:
            EndpointClosed: `aclose` had to give up on the peer; see there what holds then.
        """
        ...

    async def aclose(self) -> None:
        """Stop and release; afterwards no put of this endpoint reads or writes memory.

        Running calls raise `EndpointClosed`. Idempotent: a call during another one returns with it.
        Cancelled: goes on to its end, which takes bounded time.

        A peer that lives and does not answer in that time is given up, and `flush` raises from then on.
        Puts that had returned have let go of their `source`, and one that had not is never notified. But
        the peer may still read the `source` of the latter, whatever it holds by then, and write it to the
        slot, until it closes its transport or ends. Closing this side's transport proves no end of that.
        """
        ...


class Transport(Protocol):
    """One worker's access to its peers. Opened and closed as an async context manager."""

    @property
    def name(self) -> str: ...

    @property
    def address(self) -> bytes:
        """What a peer needs to `connect` to this transport; opaque."""
        ...

    @property
    def inbox(self) -> ObjectReceiveStream[Message]:
        """Messages and notifications from all peers; bounded, the bound is the back-pressure."""
        ...

    @property
    def counters(self) -> dict[str, int]:
        """`puts`, `put_nbytes`, `messages` sent so far: measured, not planned.

        `one_sided_nbytes`: of `put_nbytes`, what UCX wrote into the peer's memory without the peer's Python.
        """
        ...

    async def connect(self, address: bytes, peer: str) -> Endpoint:
        """Open an endpoint to the transport at `address`, calling it `peer` in errors."""
        ...

    def register(self, buffer: Buffer) -> None:
        """Prepare `buffer` for writers of its slots; borrowed until `unregister`. Idempotent."""
        ...

    def unregister(self, buffer: Buffer) -> None:
        """Undo `register`: nothing in `buffer` is exposed any more. Idempotent."""
        ...

    def expose(self, memory: memoryview, peer: str) -> RemoteSlot:
        """Let `peer` write `memory`, a part of a registered buffer's `addresses`, once.

        The memory stays borrowed until the put's notification arrives, or `withdraw` returns.
        """
        ...

    async def withdraw(self, remote: RemoteSlot) -> bool:
        """Take an exposed slot back.

        True: no byte will be written there any more. False: not provable here.
        """
        ...

    async def aclose(self) -> None:
        """Close all endpoints and the inbox, in bounded time; peers get `PeerLost`. Idempotent."""
        ...
