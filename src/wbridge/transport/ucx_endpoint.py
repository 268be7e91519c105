"""UcxxEndpoint: the sending side of one ucxx connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import anyio

from wbridge.device.runs import Runs
from wbridge.errors import EndpointClosed, PeerLost, ProtocolError
from wbridge.transport.base import Put, PutRuns, RemoteSlot
from wbridge.transport.counters import Counters
from wbridge.transport.limits import check_message, check_put
from wbridge.transport.operations import Operations
from wbridge.transport.ucx_frames import (
    Begin,
    Bye,
    Drop,
    End,
    Flush,
    Flushed,
    Forget,
    Frame,
    Gone,
    Hello,
    Region,
    Revoke,
    Small,
    Taken,
    Text,
    Welcome,
    data_tag,
)
from wbridge.transport.ucx_grants import Grant, decode_grant
from wbridge.transport.ucx_transfer import Kind, Route, Transfer, Worker
from wbridge.transport.ucx_writing import Writing

SMALL_NBYTES: Final = 4096
"""Puts up to this travel in one frame with their notification."""

_MAX_LARGE: Final = 16
"""More large puts at a time would only fill the peer's queues."""


class UcxxEndpoint:
    """Sends frames without waiting, and waits for room at the receiver before each message."""

    fill: Final = None

    def __init__(
        self,
        *,
        connection: int,
        peer: str,
        worker: Worker,
        route: Route,
        writing: Writing | None,
        is_near: bool,
        has_gpus: bool,
        send: Callable[[Frame], None],
        counters: Counters,
        close_timeout_s: float,
        forget: Callable[[], None],
    ) -> None:
        self.connection = connection
        self._peer = peer
        self._worker = worker
        self._route = route
        self._writing = writing
        self._is_near = is_near
        self._has_gpus = has_gpus
        self._send = send
        self._counters = counters
        self._close_timeout_s = close_timeout_s
        self._forget = forget
        self._operations = Operations()
        self._order = anyio.Lock(fast_acquire=True)
        self._large = anyio.Semaphore(_MAX_LARGE, fast_acquire=True)
        self._room = anyio.Semaphore(0, fast_acquire=True)
        self._transfers: set[Transfer] = set()
        self._flushes: dict[int, anyio.Event] = {}
        self._num_flushes = 0
        self._answered = anyio.Event()
        self._lost = False
        self._closing = False
        self._silent = False
        self._closed = anyio.Event()

    @property
    def peer(self) -> str:
        return self._peer

    @property
    def put_runs(self) -> PutRuns | None:
        return self._put_runs if self._is_near and self._writing is not None else None

    @property
    def put_from_gpu(self) -> Put | None:
        return self._put_from_gpu if self._has_gpus and self._writing is not None else None

    async def open(self, hello: Hello) -> None:
        """Return when the peer has accepted. Cancelled: the peer hears of it, and the caller forgets the
        endpoint.

        Raises:
            PeerLost: it ended first.
            EndpointClosed: this side closed it first.
        """
        self._send(hello)
        try:
            await self._answered.wait()
        except BaseException:  # else a peer that has accepted would grant its slots to this connection
            self._send(Bye(self.connection))
            raise
        if self._lost:
            raise self._lost_error()
        if self._closing:
            raise self._closed_error()

    async def put(self, source: memoryview, remote: RemoteSlot, notify: bytes) -> None:
        """See `Endpoint.put`. A put into a withdrawn slot writes nothing and notifies nobody."""
        await self._put(source, remote, notify, "host")

    async def _put_from_gpu(self, source: memoryview, remote: RemoteSlot, notify: bytes) -> None:
        await self._put(source, remote, notify, "cuda" if source.nbytes else "host")

    async def _put(self, source: memoryview, remote: RemoteSlot, notify: bytes, kind: Kind) -> None:
        check_put(source, remote, notify, self._peer)
        grant = decode_grant(remote.token)
        with self._operations.run():
            if grant is not None:
                async with self._large:
                    await self._write(grant, source, notify, kind)
            elif kind == "host" and source.nbytes <= SMALL_NBYTES:
                async with self._order:
                    await self._room.acquire()
                    self._send(Small(self.connection, remote.token, bytes(source), notify))
            else:
                async with self._large:  # UCX finds out itself whose memory a message comes from
                    await self._put_large(source, remote, notify)
            self._counters.add_put(source.nbytes)

    async def _put_runs(self, remote: RemoteSlot, runs: Runs, notify: bytes) -> None:
        check_message(notify, self._peer)
        grant = decode_grant(remote.token)
        if grant is None or runs.nbytes != remote.nbytes:
            raise ProtocolError(
                f"{runs.nbytes} bytes in runs to {self._peer}, which lets us write {remote.nbytes} otherwise"
            )
        with self._operations.run():
            async with self._large:
                await self._write(grant, runs, notify)
            self._counters.add_put(runs.nbytes)

    async def send(self, payload: bytes) -> None:
        """See `Endpoint.send`. Cancelled: the message is not sent."""
        check_message(payload, self._peer)
        with self._operations.run():
            async with self._order:
                await self._room.acquire()
                self._send(Text(self.connection, payload))
            self._counters.add_message()

    def send_now(self, payload: bytes) -> bool:
        return False

    async def flush(self) -> None:
        """See `Endpoint.flush`. Returns at once if the peer is dead, or the endpoint closed."""
        if self._writing is not None and not self._closed.is_set():
            await self._writing.wait_still()
        if not self._lost and not self._closed.is_set():
            for transfer in list(self._transfers):
                await transfer.stopped.wait()
        if not self._lost and not self._closed.is_set():
            await self._ask_to_flush()
        if self._silent:
            raise EndpointClosed(
                f"{self._peer} did not answer while the endpoint closed, and may still read what was put; "
                "keep that memory until the peer has ended"
            )

    async def aclose(self) -> None:
        """See `Endpoint.aclose`. Cancelled: goes on, for the time allowed for closing at most."""
        with anyio.CancelScope(shield=True):
            if self._closing:
                await self._closed.wait()  # a transport that closes its worker now would strand the flush
                return
            self._closing = True
            self._operations.end(self._closed_error)
            if self._writing is not None:
                self._writing.end()
            has_opened = self._answered.is_set()
            self._answered.set()
            try:
                if has_opened:
                    with anyio.move_on_after(self._close_timeout_s) as flushing:
                        await self.flush()
                    self._silent = flushing.cancelled_caught and not self._lost
                if not self._lost and self._writing is not None:
                    self._writing.leave(self.connection)
                elif not self._lost:
                    self._send(Bye(self.connection))
            finally:
                self._closed.set()
                self._settle()
                self._forsake_writing()
                self._forget()

    def on_frame(self, frame: Frame) -> None:
        match frame:
            case Welcome():
                self._give_room(frame.window)
                self._answered.set()
            case Taken():
                self._give_room(frame.count)
            case Flushed():
                if (answered := self._flushes.get(frame.number)) is not None:
                    answered.set()
            case Region() if self._writing is not None:
                try:
                    self._writing.learn(frame)
                except PeerLost:
                    self.lose()
                    raise
            case Forget() if self._writing is not None:
                self._writing.forget(frame)
            case Revoke() if self._writing is not None and (grant := decode_grant(frame.token)) is not None:
                self._writing.revoke(grant)
            case Gone():
                self.lose()
            case _:
                raise ProtocolError(f"{self._peer} sent {type(frame).__name__} to a sender")

    def lose(self) -> None:
        """The peer is gone: running and later calls raise `PeerLost`, and nothing is waited for."""
        self._lost = True
        self._operations.end(self._lost_error)
        self._answered.set()
        self._settle()
        if self._writing is not None:  # what does not stop by itself hangs, and then reads nothing
            self._writing.end()
            asyncio.get_running_loop().call_later(self._close_timeout_s, self._writing.forsake)

    def die(self) -> None:
        """The peer's process has ended: what is written to it goes nowhere."""
        self.lose()
        self._forsake_writing()

    async def _ask_to_flush(self) -> None:
        self._num_flushes += 1
        number = self._num_flushes
        answered = self._flushes[number] = anyio.Event()
        try:
            self._send(Flush(self.connection, number))
            await answered.wait()
        finally:
            del self._flushes[number]

    def _settle(self) -> None:
        """Nothing more comes from the peer: let go on who waits for it."""
        for answered in self._flushes.values():
            answered.set()
        for transfer in self._transfers:
            transfer.forsake()

    async def _put_large(self, source: memoryview, remote: RemoteSlot, notify: bytes) -> None:
        self._send(Begin(self.connection, remote.token, source.nbytes))
        transfer = self._worker.send(self._route, source, data_tag(remote.token), self._transfers.discard)
        if not transfer.stopped.is_set():
            self._transfers.add(transfer)
        try:
            await transfer.stopped.wait()
            transfer.raise_if_failed(self._peer)
            async with self._order:
                await self._room.acquire()
                self._send(End(self.connection, remote.token, notify))
        except BaseException:
            if not self._lost:
                self._send(Drop(self.connection, remote.token))
            raise

    async def _write(
        self, grant: Grant, source: memoryview | Runs, notify: bytes, kind: Kind = "host"
    ) -> None:
        """Write into the peer's memory, and notify once the bytes are there."""
        if self._writing is None or grant.connection != self.connection:
            return  # granted to another connection, which is over
        transfer = await self._writing.start(grant, source, kind)
        if transfer is None:
            return
        await transfer.stopped.wait()
        transfer.raise_if_failed(self._peer)
        async with self._order:
            await self._room.acquire()
            self._send(End(self.connection, grant.encode(), notify))
        self._counters.add_one_sided(source.nbytes)

    def _forsake_writing(self) -> None:
        if self._writing is not None:
            self._writing.forsake()

    def _give_room(self, count: int) -> None:
        for _ in range(count):
            self._room.release()

    def _lost_error(self) -> PeerLost:
        return PeerLost(f"{self._peer} is gone; reconnect, or go on without it")

    def _closed_error(self) -> EndpointClosed:
        return EndpointClosed(f"the endpoint to {self._peer} is closed; connect again")
