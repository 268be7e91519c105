"""Mailer: gathers credited pieces and puts them into one receiver's slots."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import anyio
import anyio.abc
import anyio.to_thread
import msgspec

from wbridge.device.base import Buffer, Event, PeerMemory
from wbridge.device.runs import Runs
from wbridge.engine.context import WriterContext
from wbridge.engine.wire import encode
from wbridge.errors import EndpointClosed, PeerLost
from wbridge.flow.actions import Flush, SendStopped
from wbridge.flow.messages import Arrived, Credit, Placed, Placement, Stopped
from wbridge.plan.types import Piece
from wbridge.staging.base import Source
from wbridge.staging.checksum import checksum
from wbridge.staging.runs import runs_of_slot
from wbridge.staging.slots import LocalSlot, Place
from wbridge.transport.base import Endpoint, RemoteSlot, Window


class Order(msgspec.Struct, frozen=True, eq=False):
    """One piece to write now: the receiver has given a slot for it."""

    credit: Credit
    piece: Piece
    source: Source
    checksum: int = 0
    """What is known of the bytes already; 0: nothing."""


class Mailer:
    """All that one sender writes to one receiver; a slow receiver delays no other.

    Pieces are gathered straight into the receiver's memory where that is in reach. Else they are put: as they
    lie, where they do so in runs, or from the slots kept for this receiver.

    `put_ended` is called with each order once neither end is touched any more, `flushed` with each
    flush, `lost` when the mailer has ended.
    """

    def __init__(
        self,
        context: WriterContext,
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
        self._slots = context.gather_slots.get(endpoint.peer)
        self._placements: dict[str, Placement] = {}
        self._slot_runs: dict[int, Runs] = {}  # by the identity of a piece
        self._adopted: dict[int, tuple[PeerMemory, Buffer]] = {}  # by the identity of the first
        self._adopting = anyio.Lock(fast_acquire=True)
        self._running: dict[Order, anyio.CancelScope] = {}
        self._scope = anyio.CancelScope()
        self._is_ending = False
        self._flushes: set[anyio.CancelScope] = set()
        self._closing = anyio.Lock()
        self._tasks: anyio.abc.TaskGroup
        # Unbounded, bounded by what may be in it: a few messages for each ticket.
        self._notes, self._note_inbox = anyio.create_memory_object_stream[Flush | SendStopped](math.inf)

    def start(self, order: Order) -> None:
        """From the end of the mailer on, nothing begins: `lost` tells of it, or an error ends the worker."""
        if self._is_ending:
            return
        self._running[order] = anyio.CancelScope()
        self._tasks.start_soon(self._put, order)

    def placed(self, placed: Placed) -> None:
        """Gather into these parameters of the receiver instead of into slots. Before the first order."""
        self._placements.update((place.parameter, place) for place in placed.parameters)

    def cancel(self, order: Order) -> None:
        """Stop the put if it is running, and do not begin it if it is not. `put_ended` comes as before."""
        if (scope := self._running.get(order)) is not None:
            scope.cancel()

    def follow_up(self, note: Flush | SendStopped) -> None:
        """Flush, or send a message behind the notifications of all earlier puts; nothing once it ends."""
        if not self._is_ending:
            self._notes.send_nowait(note)

    def stop(self) -> None:
        """The receiver is gone: end every put at once."""
        self._scope.cancel()

    async def run(self) -> None:
        """Work until cancelled, stopped, or the receiver is found to be gone."""
        try:
            with self._scope:
                async with anyio.create_task_group() as self._tasks:
                    self._tasks.start_soon(self._watch_end)
                    await self._follow_up_all()
        except* (PeerLost, EndpointClosed):
            pass  # the coordinator hears of it by itself, and tells everyone
        finally:
            self._notes.close()
            self._note_inbox.close()
            with anyio.CancelScope(shield=True):
                await self._close()
        self._lost(self._endpoint.peer)

    async def _put(self, order: Order) -> None:
        with self._running[order]:
            await self._bring(order)
        del self._running[order]
        self._put_ended(self._endpoint.peer, order)

    async def _bring(self, order: Order) -> None:
        remote = RemoteSlot(order.credit.token, order.credit.nbytes)
        if self._endpoint.fill is not None:
            await self._endpoint.fill(remote, functools.partial(self._gather_there, order))
        elif order.credit.in_place and (lent := order.source.lend(order.piece, self._placements)):
            await self._put_lent(order, remote, *lent)
        elif self._slots is not None:
            slot = await self._slots.acquire()
            try:
                await self._gather_and_put(order, slot, remote)
            finally:
                self._slots.release(slot)

    async def _gather_there(self, order: Order, window: Window) -> bytes:
        """Gather into the receiver's own slot, or into its parameters."""
        gathered = self._gather(order, Place(await self._adopt(window.memory), window.offset))
        try:
            await gathered.wait()
            return await self._arrived(order, window)
        except BaseException:  # whatever it is, the copy must have stopped; raised again
            with anyio.CancelScope(shield=True):
                await gathered.wait()  # writes the slot, and reads the weights
            raise

    async def _adopt(self, memory: PeerMemory) -> Buffer:
        """In a thread, since page-locking a whole ring takes its time."""
        if id(memory) not in self._adopted:
            async with self._adopting:
                if id(memory) not in self._adopted:
                    adopt = self._context.staging.adopt
                    self._adopted[id(memory)] = memory, await anyio.to_thread.run_sync(adopt, memory)
        return self._adopted[id(memory)][1]

    def _gather(self, order: Order, there: Place) -> Event:
        if order.credit.in_place:
            return order.source.gather_in_place(order.piece, there.buffer, self._placements)
        return order.source.gather(order.piece, there)

    async def _put_lent(self, order: Order, remote: RemoteSlot, runs: Runs, ready: Event) -> None:
        """Put straight from the weights into the parameters."""
        try:
            await ready.wait()
            await self._put_runs(order, remote, runs)
        except BaseException:  # whatever it is, the put must have stopped; raised again
            with anyio.CancelScope(shield=True):
                await self._settle()  # reads the weights
            raise

    async def _put_runs(self, order: Order, remote: RemoteSlot, runs: Runs) -> None:
        put_runs = self._endpoint.put_runs
        assert put_runs is not None, "who can be written in place told us so over this very connection"
        await put_runs(remote, runs, self._notification(order, 0))

    async def _gather_and_put(self, order: Order, slot: LocalSlot, remote: RemoteSlot) -> None:
        gathered = order.source.gather(order.piece, slot.place)
        try:
            await gathered.wait()
            there = Window(slot.view(order.piece.nbytes), 0, order.piece.nbytes)
            if order.credit.in_place:
                return await self._put_runs(order, remote, self._runs_of_slot(order.piece, there.view))
            put = self._endpoint.put if slot.buffer.is_host else self._endpoint.put_from_gpu
            assert put is not None, "slots are on a GPU only for endpoints that put from there"
            await put(there.view, remote, await self._arrived(order, there))
        except BaseException:  # whatever it is, both copies must have stopped; raised again
            with anyio.CancelScope(shield=True):
                await gathered.wait()  # reads the weights
                await self._settle()  # reads the slot
            raise

    def _runs_of_slot(self, piece: Piece, slot: memoryview) -> Runs:
        runs = self._slot_runs.get(id(piece))
        if runs is None:
            runs = self._slot_runs[id(piece)] = runs_of_slot(piece, self._placements)
        return runs.read_from(slot)

    async def _arrived(self, order: Order, gathered: Window) -> bytes:
        total = order.checksum
        if self._sums and not total:
            total = await anyio.to_thread.run_sync(checksum, gathered.view)
        return self._notification(order, total)

    def _notification(self, order: Order, total: int) -> bytes:
        """Of this piece, that it has arrived."""
        credit = order.credit
        return encode(self._context.epoch, Arrived(credit.ticket, credit.group, credit.piece, total))

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
