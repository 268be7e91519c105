"""Mailer: gathers credited pieces and puts them into one receiver's slots."""

from __future__ import annotations

import math
from collections.abc import Callable

import anyio
import anyio.abc
import anyio.to_thread
import msgspec

from wbridge.engine.context import SenderContext
from wbridge.engine.wire import encode
from wbridge.errors import EndpointClosed, PeerLost
from wbridge.flow.actions import Flush, SendStopped
from wbridge.flow.messages import Arrived, Credit, Stopped
from wbridge.plan.types import Piece
from wbridge.staging.base import Source
from wbridge.staging.checksum import checksum
from wbridge.transport.base import Endpoint, RemoteSlot


class Order(msgspec.Struct, frozen=True, eq=False):
    """One piece to write now: the receiver has given a slot for it."""

    credit: Credit
    piece: Piece
    source: Source


class Mailer:
    """All that one sender writes to one receiver; a slow receiver delays no other.

    `put_ended` is called with each order once neither end is touched any more, `flushed` with each
    flush, `lost` when the mailer has ended.
    """

    def __init__(
        self,
        context: SenderContext,
        endpoint: Endpoint,
        *,
        put_ended: Callable[[str, Order], None],
        flushed: Callable[[Flush], None],
        lost: Callable[[str], None],
    ) -> None:
        self._context = context
        self._endpoint = endpoint
        self._put_ended, self._flushed, self._lost = put_ended, flushed, lost
        self._sums = endpoint.peer in context.checksums
        self._running: dict[Order, anyio.CancelScope] = {}
        self._scope = anyio.CancelScope()
        self._is_ending = False
        self._flushes: set[anyio.CancelScope] = set()
        self._closing = anyio.Lock()
        # Unbounded streams, bounded by what may be in them: one order for each credit that was given,
        # a few messages for each ticket.
        self._orders, self._order_inbox = anyio.create_memory_object_stream[Order](math.inf)
        self._notes, self._note_inbox = anyio.create_memory_object_stream[Flush | SendStopped](math.inf)

    def start(self, order: Order) -> None:
        self._running[order] = anyio.CancelScope()
        self._orders.send_nowait(order)

    def cancel(self, order: Order) -> None:
        """Stop the put if it is running, and do not begin it if it is not. `put_ended` comes as before."""
        if (scope := self._running.get(order)) is not None:
            scope.cancel()

    def follow_up(self, note: Flush | SendStopped) -> None:
        """Flush, or send a message behind the notifications of all earlier puts."""
        self._notes.send_nowait(note)

    def stop(self) -> None:
        """The receiver is gone: end every put at once."""
        self._scope.cancel()

    async def run(self) -> None:
        """Work until cancelled, stopped, or the receiver is found to be gone."""
        try:
            with self._scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._watch_end)
                    tasks.start_soon(self._follow_up_all)
                    async for order in self._order_inbox:
                        tasks.start_soon(self._put, order)
        except* (PeerLost, EndpointClosed):
            pass  # the coordinator hears of it by itself, and tells everyone
        finally:
            for stream in (self._orders, self._order_inbox, self._notes, self._note_inbox):
                stream.close()
            with anyio.CancelScope(shield=True):
                await self._close()
        self._lost(self._endpoint.peer)

    async def _put(self, order: Order) -> None:
        with self._running[order]:
            await self._gather_and_put(order)
        del self._running[order]
        self._put_ended(self._endpoint.peer, order)

    async def _gather_and_put(self, order: Order) -> None:
        staging, piece, credit = self._context.staging, order.piece, order.credit
        slot = await staging.acquire()
        try:
            gathered = order.source.gather(piece, slot)
            try:
                await gathered.wait()
                view = slot.view(piece.nbytes)
                total = await anyio.to_thread.run_sync(checksum, view) if self._sums else 0
                arrived = Arrived(credit.ticket, credit.group, credit.piece, total)
                remote = RemoteSlot(credit.token, credit.nbytes)
                await self._endpoint.put(view, remote, encode(self._context.epoch, arrived))
            except BaseException:  # whatever it is, both copies must have stopped; raised again
                with anyio.CancelScope(shield=True):
                    await gathered.wait()  # reads the weights
                    await self._settle()  # reads the slot
                raise
        finally:
            staging.release(slot)

    async def _settle(self) -> None:
        """Return when no put of this mailer touches memory any more; to be shielded.

        A flush waits for the receiver. Closing takes bounded time, but ends the mailer.
        """
        with anyio.CancelScope() as flush:
            self._flushes.add(flush)
            if not self._is_ending:
                await self._endpoint.flush()
        self._flushes.discard(flush)
        if self._is_ending:
            await self._close()

    async def _close(self) -> None:
        async with self._closing:  # the second one also returns when it has closed
            await self._endpoint.aclose()

    async def _watch_end(self) -> None:
        """From the end of the mailer on, nothing waits for the receiver."""
        try:
            await anyio.sleep_forever()
        finally:
            self._is_ending = True
            for flush in self._flushes:
                flush.cancel()

    async def _follow_up_all(self) -> None:
        async for note in self._note_inbox:
            if isinstance(note, Flush):
                await self._endpoint.flush()
                self._flushed(note)
            else:
                stopped = Stopped(note.ticket, note.group)
                await self._endpoint.send(encode(self._context.epoch, stopped))
