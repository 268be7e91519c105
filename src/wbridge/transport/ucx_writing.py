"""Writing: the sender's side of one-sided puts, on one connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import anyio

from wbridge.device.runs import Runs
from wbridge.errors import ProtocolError
from wbridge.transport.ucx_frames import Bye, Forget, Frame, Region, Revoked
from wbridge.transport.ucx_grants import Grant
from wbridge.transport.ucx_native import NativeUcxWorker
from wbridge.transport.ucx_transfer import Kind, Route, Transfer


class _Window(NamedTuple):
    """Memory of the peer that this side can write."""

    address: int
    nbytes: int
    key: int


class Writing:
    """Writes granted slots, each once, and says of those that the peer takes back when they are still."""

    def __init__(self, worker: NativeUcxWorker, route: Route, send: Callable[[Frame], None]) -> None:
        self._worker = worker
        self._route = route
        self._send = send
        self._windows: dict[int, _Window] = {}
        self._forgotten: set[int] = set()
        self._news = anyio.Event()
        self._used: set[int] = set()
        """Serials of grants that were written or taken back, beyond `_all_used`."""
        self._all_used = 0
        self._running: dict[Grant, Transfer] = {}
        self._revoked: set[Grant] = set()
        self._is_over = False
        self._has_left = False

    def learn(self, region: Region) -> None:
        key = self._worker.unpack(self._route, region.key)
        self._windows[region.number] = _Window(region.address, region.nbytes, key)
        self._tell()

    def forget(self, region: Forget) -> None:
        if (window := self._windows.pop(region.number, None)) is not None:
            self._worker.forget_key(window.key)
        self._forgotten.add(region.number)
        self._tell()

    async def start(self, grant: Grant, source: memoryview | Runs, kind: Kind) -> Transfer | None:
        """Start to write the slot, or places in the memory that it is a part of, from memory of that kind.
        None: it was taken back, or written before. Cancelled: not started."""
        end = source.end if isinstance(source, Runs) else grant.offset + source.nbytes
        window = await self._window(grant, end)
        if window is None:
            return None

        def stopped(_: Transfer) -> None:
            self._stopped(grant)

        if isinstance(source, Runs):
            place = window.address
            transfer = self._worker.put_runs(self._route, source, remote=place, key=window.key, then=stopped)
        else:
            place = window.address + grant.offset
            transfer = self._worker.put(
                self._route, source, remote=place, key=window.key, kind=kind, then=stopped
            )
        self._running[grant] = transfer
        return transfer

    async def _window(self, grant: Grant, end: int) -> _Window | None:
        """Take the grant, for bytes up to `end`."""
        while grant.region not in self._windows:
            if grant.region in self._forgotten:
                return None
            await self._news.wait()
        if self._is_over or not self._use(grant):
            return None
        window = self._windows[grant.region]
        if end > window.nbytes:
            raise ProtocolError(f"a slot up to byte {end} reaches out of memory of {window.nbytes} bytes")
        return window

    def revoke(self, grant: Grant) -> None:
        """Write the slot no more, and say so once that is true."""
        self._use(grant)
        if grant in self._running:
            self._revoked.add(grant)
        else:
            self._send(Revoked(grant.connection, grant.encode()))

    def end(self) -> None:
        """Start nothing more: a put that still waits may notice later that its endpoint has ended."""
        self._is_over = True

    def leave(self, connection: int) -> None:
        """Say that the connection is closed, and once more when the puts that still run are over."""
        self._has_left = True
        self._send(Bye(connection, not self._running))

    async def wait_still(self) -> None:
        for transfer in list(self._running.values()):
            await transfer.stopped.wait()

    def forsake(self) -> None:
        """The peer can be told nothing any more: let go on who waits."""
        for transfer in list(self._running.values()):
            transfer.forsake()

    def _use(self, grant: Grant) -> bool:
        """Whether this is the first time. Every grant is written or taken back at last, so few are beyond."""
        if grant.serial <= self._all_used or grant.serial in self._used:
            return False
        self._used.add(grant.serial)
        while self._all_used + 1 in self._used:
            self._all_used += 1
            self._used.remove(self._all_used)
        return True

    def _stopped(self, grant: Grant) -> None:
        del self._running[grant]
        if grant in self._revoked:
            self._revoked.remove(grant)
            self._send(Revoked(grant.connection, grant.encode()))
        if self._has_left and not self._running:
            self._send(Bye(grant.connection))

    def _tell(self) -> None:
        self._news.set()
        self._news = anyio.Event()
