"""FaultyTransport: any transport, made to delay, reorder, break and silently lose, the same way every run."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Final, Self

import anyio
import anyio.lowlevel
import msgspec
from anyio.abc import ObjectReceiveStream

from wbridge.device.base import Buffer
from wbridge.errors import PeerLost
from wbridge.transport.base import Endpoint, Message, RemoteSlot, Transport


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """What goes wrong. Each decision depends on `seed`, the peer and a count, never on time.

    A held operation lets up to `max_passes` passes of the event loop go by first, so operations of
    different endpoints overtake each other; messages of one endpoint stay in order. `cut_after` gives
    for a peer the number of operations after which its endpoint dies. A lost put is notified, but
    its bytes go nowhere: `lose_exposures` counts this transport's calls of `expose` from 0.
    """

    seed: int = 0
    hold_rate: float = 0.0
    max_passes: int = 20
    cut_after: Mapping[str, int] = {}
    lose_rate: float = 0.0
    lose_exposures: frozenset[int] = frozenset()


class FaultyTransport:
    """Wraps an open transport and owns it: closing this closes it.

    Besides what `faults` says, `hold` stops all operations of new and old endpoints until `release`.
    """

    def __init__(self, inner: Transport, faults: Faults | None = None) -> None:
        self._inner = inner
        self.faults: Faults = faults or Faults()
        self._num_exposed = 0
        self._gate: anyio.Event | None = None
        self._endpoints: list[FaultyEndpoint] = []
        self._lost: list[bytearray] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def address(self) -> bytes:
        return self._inner.address

    @property
    def inbox(self) -> ObjectReceiveStream[Message]:
        return self._inner.inbox

    @property
    def counters(self) -> dict[str, int]:
        return self._inner.counters

    @property
    def num_lost(self) -> int:
        """Exposures whose bytes went nowhere."""
        return len(self._lost)

    def hold(self) -> None:
        if self._gate is None:
            self._gate = anyio.Event()

    def release(self) -> None:
        if self._gate is not None:
            self._gate.set()
            self._gate = None

    async def pass_gate(self) -> None:
        while self._gate is not None:
            await self._gate.wait()

    async def connect(self, address: bytes, peer: str) -> FaultyEndpoint:
        endpoint = FaultyEndpoint(self, await self._inner.connect(address, peer))
        self._endpoints.append(endpoint)
        return endpoint

    def register(self, buffer: Buffer) -> None:
        self._inner.register(buffer)

    def unregister(self, buffer: Buffer) -> None:
        self._inner.unregister(buffer)

    def expose(self, memory: memoryview, peer: str) -> RemoteSlot:
        index = self._num_exposed
        self._num_exposed += 1
        if index in self.faults.lose_exposures or self.decide("lose", peer, index) < self.faults.lose_rate:
            self._lost.append(bytearray(memory.nbytes))
            memory = memoryview(self._lost[-1])
        return self._inner.expose(memory, peer)

    async def withdraw(self, remote: RemoteSlot) -> bool:
        return await self._inner.withdraw(remote)

    async def cut(self, peer: str) -> None:
        """Let all endpoints to `peer` die now."""
        for endpoint in self._endpoints:
            if endpoint.peer == peer:
                await endpoint.cut()

    async def aclose(self) -> None:
        self.release()
        await self._inner.aclose()

    def decide(self, what: str, peer: str, index: int) -> float:
        """Return a number from 0 to 1 that depends on the arguments and the seed alone."""
        return random.Random(f"{self.faults.seed}/{self.name}/{what}/{peer}/{index}").random()


class FaultyEndpoint:
    """An endpoint whose operations are held, or which dies. It always copies: only puts can be lost."""

    fill: Final = None
    put_runs: Final = None
    put_from_gpu: Final = None

    def __init__(self, owner: FaultyTransport, inner: Endpoint) -> None:
        self._owner = owner
        self._inner = inner
        self._num_operations = 0
        self._order = anyio.Lock()
        self._running: set[anyio.CancelScope] = set()
        self._is_cut = False

    @property
    def peer(self) -> str:
        return self._inner.peer

    async def put(self, source: memoryview, remote: RemoteSlot, notify: bytes) -> None:
        with self._operation() as index:
            await self._hold(index)
            await self._inner.put(source, remote, notify)

    async def send(self, payload: bytes) -> None:
        with self._operation() as index:
            async with self._order:
                await self._hold(index)
                await self._inner.send(payload)

    def send_now(self, payload: bytes) -> bool:
        return False

    async def flush(self) -> None:
        await self._inner.flush()

    async def cut(self) -> None:
        """Die: running and later operations raise `PeerLost`."""
        self._die()
        await self._inner.aclose()

    async def aclose(self) -> None:
        await self._inner.aclose()

    def _die(self) -> None:
        self._is_cut = True
        for scope in list(self._running):
            scope.cancel()

    @contextmanager
    def _operation(self) -> Iterator[int]:
        index = self._num_operations
        self._num_operations += 1
        limit = self._owner.faults.cut_after.get(self.peer)
        if limit is not None and index >= limit:
            self._die()
        if self._is_cut:
            raise self._lost()
        with anyio.CancelScope() as scope:
            self._running.add(scope)
            try:
                yield index
            finally:
                self._running.discard(scope)
        if scope.cancelled_caught:
            raise self._lost()

    async def _hold(self, index: int) -> None:
        await self._owner.pass_gate()
        faults = self._owner.faults
        if self._owner.decide("hold", self.peer, index) < faults.hold_rate:
            share = self._owner.decide("passes", self.peer, index)
            for _ in range(round(share * faults.max_passes)):
                await anyio.lowlevel.checkpoint()

    def _lost(self) -> PeerLost:
        return PeerLost(f"{self.peer} was cut off by fault injection; reconnect, or go on without it")
