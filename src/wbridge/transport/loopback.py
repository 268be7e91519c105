"""LoopbackTransport: the transport between workers of one process, each on its own event loop."""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType
from typing import Final, Self

import anyio

from wbridge.device.base import Buffer
from wbridge.errors import EndpointClosed, PeerLost
from wbridge.transport.base import Message, RemoteSlot
from wbridge.transport.copying import Copies, copy
from wbridge.transport.counters import Counters
from wbridge.transport.exposures import Exposures
from wbridge.transport.inbox import Inbox
from wbridge.transport.limits import check_message, check_put
from wbridge.transport.operations import Operations


class _Registry:
    """The process's open loopback transports by address, held weakly.

    An address has to mean something to another adapter of the process, so this is the one object
    that adapters share.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._transports = weakref.WeakValueDictionary[bytes, "LoopbackTransport"]()

    def add(self, transport: LoopbackTransport) -> None:
        with self._lock:
            self._transports[transport.address] = transport

    def remove(self, transport: LoopbackTransport) -> None:
        with self._lock:
            self._transports.pop(transport.address, None)

    def find(self, address: bytes) -> LoopbackTransport | None:
        with self._lock:
            return self._transports.get(address)


_REGISTRY: Final = _Registry()


class LoopbackTransport:
    """Copies inside one process; bounded and blocking like the transports that leave it."""

    def __init__(self, name: str, *, inbox: Inbox | None = None, exposures: Exposures | None = None) -> None:
        self._name = name
        self._address = os.urandom(16)
        self._inbox = inbox or Inbox(name)
        self._exposures = exposures or Exposures()
        self._counters = Counters()
        self._endpoints: set[LoopbackEndpoint] = set()
        self._closed = False

    async def __aenter__(self) -> Self:
        _REGISTRY.add(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    @property
    def name(self) -> str:
        return self._name

    @property
    def address(self) -> bytes:
        return self._address

    @property
    def inbox(self) -> Inbox:
        return self._inbox

    @property
    def exposures(self) -> Exposures:
        return self._exposures

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def counters(self) -> dict[str, int]:
        return self._counters.as_dict()

    async def connect(self, address: bytes, peer: str, counters: Counters | None = None) -> LoopbackEndpoint:
        """Open an endpoint; `counters` replaces the transport's own.

        Raises:
            PeerLost: no open transport of this process has that address.
            EndpointClosed: this transport is closed.
        """
        if self._closed:
            raise EndpointClosed(f"{self._name}: the loopback transport is closed; open a new one")
        target = _REGISTRY.find(address)
        if target is None:
            raise PeerLost(f"{self._name}: {peer} has no open transport in this process; connect it first")
        endpoint = LoopbackEndpoint(self, target, peer, counters or self._counters)
        self._endpoints.add(endpoint)
        return endpoint

    def forget(self, endpoint: LoopbackEndpoint) -> None:
        self._endpoints.discard(endpoint)

    def register(self, buffer: Buffer) -> None:
        """Nothing to do: all memory of the process is in reach."""

    def unregister(self, buffer: Buffer) -> None:
        """Nothing to do."""

    def expose(self, memory: memoryview, peer: str) -> RemoteSlot:
        if self._closed:
            raise EndpointClosed(f"{self._name}: cannot expose memory to {peer}: the transport is closed")
        return self._exposures.expose(memory)

    async def withdraw(self, remote: RemoteSlot) -> bool:
        return await self._exposures.withdraw(remote)

    async def aclose(self) -> None:
        """Close all endpoints and the inbox; peers get `PeerLost`. Idempotent."""
        self._closed = True
        _REGISTRY.remove(self)
        self._inbox.close()
        for endpoint in list(self._endpoints):
            await endpoint.aclose()


class LoopbackEndpoint:
    """Writes into the exposed memory of another transport of the process."""

    fill: Final = None
    put_runs: Final = None
    put_from_gpu: Final = None

    def __init__(
        self, owner: LoopbackTransport, target: LoopbackTransport, peer: str, counters: Counters
    ) -> None:
        self._owner = owner
        self._target = target
        self._peer = peer
        self._counters = counters
        self._order = anyio.Lock(fast_acquire=True)
        self._operations = Operations()
        self._copies = Copies()

    @property
    def peer(self) -> str:
        return self._peer

    async def put(self, source: memoryview, remote: RemoteSlot, notify: bytes) -> None:
        """See `Endpoint.put`. A put into a withdrawn slot writes nothing and notifies nobody.

        Cancelled while bytes are copied: waits for the end of the copy, which needs no peer.
        """
        check_put(source, remote, notify, self._peer)
        self._check_target()
        with self._operations.run():
            memory = self._target.exposures.begin(remote.token, source.nbytes)
            if memory is None:
                return
            try:
                await self._copy(memory, source)
            finally:
                self._target.exposures.finish(remote.token)
            await self._deliver(notify)
            self._counters.add_put(source.nbytes)

    async def send(self, payload: bytes) -> None:
        """See `Endpoint.send`. Cancelled: the message is not sent."""
        check_message(payload, self._peer)
        self._check_target()
        with self._operations.run():
            await self._deliver(payload)
            self._counters.add_message()

    def send_now(self, payload: bytes) -> bool:
        return False

    async def flush(self) -> None:
        await self._copies.settle()

    async def aclose(self) -> None:
        """End what waits for the peer, then wait for running copies. Idempotent."""
        self._owner.forget(self)
        self._operations.end(self._closed_error)
        with anyio.CancelScope(shield=True):
            await self.flush()

    def _check_target(self) -> None:
        if self._target.closed and not self._operations.ended:
            raise PeerLost(
                f"{self._owner.name}: {self._peer} closed its transport; reconnect, or go on without it"
            )

    def _closed_error(self) -> EndpointClosed:
        return EndpointClosed(f"{self._owner.name}: the endpoint to {self._peer} is closed; connect again")

    async def _deliver(self, payload: bytes) -> None:
        async with self._order:
            await self._target.inbox.deliver(Message(self._owner.name, payload))

    async def _copy(self, target: memoryview, source: memoryview) -> None:
        async with self._copies.one():
            await copy(target, source)
