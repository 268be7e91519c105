"""ReceiveEngine: gives credits, tracks arrivals, and writes landed groups into the parameters."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Coroutine, Iterable

import anyio
import anyio.abc
import anyio.to_thread

from wbridge.device.base import Event
from wbridge.device.wakeup import Latch
from wbridge.engine.checks import Check, Checks
from wbridge.engine.context import ReceiverContext, close_endpoints
from wbridge.engine.credits import CreditSender
from wbridge.engine.exchange import ExchangeMember
from wbridge.engine.exposed import Exposed
from wbridge.engine.relay import Relay
from wbridge.engine.scatters import Scatters
from wbridge.errors import InternalError, ProtocolError, UpdateAborted
from wbridge.flow.actions import GiveCredit, GroupReady, ReplaceSlot, RingAction, TakeBack, ToLeader
from wbridge.flow.messages import Alive, Arrived, Credit, Placement, Stopped, Unwanted, Vacant
from wbridge.flow.ring import Incoming, ReceiverRing
from wbridge.plan.types import Group
from wbridge.transport.base import RemoteSlot


class ReceiveEngine:
    """Drives the `ReceiverRing` of one worker for one epoch.

    `to_leader` receives what the ring has to tell the engine's leader, `give_up` each ticket that this
    worker cannot land, with the reason.
    """

    def __init__(
        self,
        context: ReceiverContext,
        *,
        to_leader: Callable[[ToLeader], None],
        give_up: Callable[[int, str], None],
    ) -> None:
        self._context = context
        self._to_leader = to_leader
        self._give_up = give_up
        self._groups = context.plan.incoming
        self._ring = ReceiverRing(context.staging.num_slots, parked=context.staging.takes_parked)
        self._incoming = tuple(
            Incoming(tuple(str(piece.writer) for piece in group.pieces), group.stage)
            for group in self._groups
        )
        self._exposed = Exposed(context.transport)
        self._ready: dict[tuple[int, int], int] = {}
        self._ticket = 0
        self._aborted: dict[int, str] = {}
        self._progress = Latch()
        self._exchange = self._join_exchange()
        self._scatters: Scatters | None = None
        self._after: Event | None = None
        self.received_nbytes: int = 0
        self.num_written: int = 0
        """Groups that the last `apply` has begun to write."""
        self.unproven: list[RemoteSlot] = []
        """After `run`: parts of the parameters that a writer may still write, until they are withdrawn."""
        self._credits = {
            name: CreditSender(
                context.epoch,
                endpoint,
                self._placements_for(name),
                broken=functools.partial(self._cut_off, name),
            )
            for name, endpoint in context.endpoints.items()
        }
        self._checks = Checks(self._checked)
        # Unbounded, bounded by what may be in it: one fence for each piece.
        self._fences, self._fence_inbox = anyio.create_memory_object_stream[
            Callable[[], Coroutine[object, object, object]]
        ](math.inf)

    @property
    def _is_in_place(self) -> bool:
        return self._context.staging.placements is not None

    def _join_exchange(self) -> ExchangeMember | None:
        context = self._context
        if context.relay is None:
            return None
        relay = Relay(
            context.relay,
            self._groups,
            keep=self._ring.keep,
            let_go=lambda slot: self._perform(self._ring.checked(slot)),
        )
        return ExchangeMember(
            context.worker,
            context.plan.exchanges,
            self._groups,
            relay,
            patience_s=context.config.relay_patience_s,
            reassign=lambda *moved: self._perform(self._ring.reassign(*moved)),
            tell=lambda member, message: self._credits[member].give(message),
            give_up=self._give_up,
        )

    def _placements_for(self, writer: str) -> list[Placement]:
        placements = self._context.staging.placements
        if placements is None:
            return []
        pieces = [piece for group in self._groups for piece in group.pieces if str(piece.writer) == writer]
        names = {transfer.target_parameter for piece in pieces for transfer in piece.transfers}
        return [placements[name] for name in sorted(names)]

    async def run(self) -> None:
        """Give credits and guard quarantined slots until cancelled; then nobody may write the ring.

        Who holds a slot for longer than `close_timeout_s` is not waited for: see `unproven`.
        """
        try:
            with self._fences, self._fence_inbox:
                async with anyio.create_task_group() as tasks:
                    for sender in self._credits.values():
                        tasks.start_soon(sender.run)
                    if self._exchange is not None:
                        tasks.start_soon(self._exchange.run)
                    tasks.start_soon(self._checks.run)
                    for buffer in self._context.staging.buffers:
                        self._context.transport.register(buffer)
                    self._perform(self._ring.start())
                    async for fence in self._fence_inbox:
                        tasks.start_soon(fence)
        finally:
            try:
                await close_endpoints(self._context)
                with anyio.move_on_after(self._context.config.close_timeout_s, shield=True):
                    async with anyio.create_task_group() as tasks:
                        for key in self._exposed.keys:
                            tasks.start_soon(self._exposed.retract, key)
            finally:
                if self._is_in_place:
                    self.unproven = self._exposed.remote_slots
                for buffer in self._context.staging.buffers:
                    self._context.transport.unregister(buffer)
                self._context.staging.close()
                if self._context.relay is not None:
                    self._context.relay.staging.close()

    # What arrives -------------------------------------------------------------------------------------

    def serve(self, ticket: int, engines: Iterable[str] = ()) -> None:
        """Take a grant: credit its first groups. `engines` take it together, this one among them."""
        self._ticket = ticket
        self._aborted.clear()
        self._ready = {key: slot for key, slot in self._ready.items() if key[0] == ticket}
        self._checks.begin(ticket)
        before_hold = self._context.staging.groups_before_hold(len(self._groups))
        incoming = self._incoming
        if self._exchange is not None:
            incoming = self._exchange.serve(ticket, engines)
        self._perform(self._ring.grant(ticket, incoming, before_hold=before_hold))

    def abort(self, ticket: int, reason: str) -> None:
        """Void the grant; an apply that waits for its bytes raises `UpdateAborted`."""
        self._aborted[ticket] = reason
        if self._exchange is not None:
            self._exchange.end(ticket)
        self._perform(self._ring.abort(ticket))
        self._wake()

    def abort_current(self, reason: str) -> None:
        """Void whatever grant there is: the engine is broken, and nobody will say what becomes of it."""
        self.abort(self._ticket, reason)

    def arrived(self, writer: str, arrived: Arrived) -> None:
        """A piece is in its slot; with a checksum it counts only when that is found right."""
        if not self._exposed.arrived((arrived.ticket, arrived.group, arrived.piece, writer)):
            return  # stale, or a second arrival
        self.received_nbytes += self._groups[arrived.group].pieces[arrived.piece].nbytes
        if self._exchange is not None:
            self._exchange.arrived(arrived.ticket, writer, arrived.group, arrived.piece)
        slot = self._ring.checking(writer, arrived) if arrived.checksum else None
        if slot is None:
            self._perform(self._ring.arrived(writer, arrived))
            return
        piece = self._groups[arrived.group].pieces[arrived.piece]
        view = self._context.staging.slot_view(slot, piece.offset, piece.nbytes)
        self._checks.add(Check(writer, arrived, slot, view))

    def stopped(self, writer: str, stopped: Stopped) -> None:
        """The writer writes nothing of this any more, so what it was to write is not exposed any longer."""
        self._perform(self._ring.stopped(writer, stopped))
        for key in self._exposed.of_writer(writer, stopped.ticket, stopped.group):
            self._fences.send_nowait(functools.partial(self._exposed.retract, key))
        if self._exchange is not None:
            self._exchange.stopped(writer, stopped)

    def from_member(self, peer: str, message: Credit | Alive | Unwanted) -> None:
        """Another rollout lets us write, or waits for us, or does not any more."""
        if self._exchange is None:
            raise ProtocolError(f"{peer} takes {self._context.worker} for a relay; run one release")
        self._exchange.heard(peer)
        if isinstance(message, Credit):
            self._exchange.credit(peer, message)
        elif isinstance(message, Unwanted):
            self._exchange.unwanted(peer, message.ticket)

    def heard(self, peer: str) -> None:
        """Something has come from it."""
        if self._exchange is not None:
            self._exchange.heard(peer)

    def lose(self, peer: str) -> None:
        """Another worker is gone: nothing more comes from it, and nothing is passed on to it."""
        if self._exchange is not None:
            self._exchange.lose(peer)

    def _checked(self, check: Check, is_right: bool) -> None:
        arrived = check.arrived
        if is_right:
            if self._exchange is not None:
                self._exchange.verified(
                    arrived.ticket, arrived.group, arrived.piece, check.slot, check.view, arrived.checksum
                )
            self._perform(self._ring.arrived(check.writer, arrived))
        elif arrived.ticket == self._ticket and arrived.ticket not in self._aborted:
            self._refuse(check)
        self._perform(self._ring.checked(check.slot))

    def _cut_off(self, writer: str) -> None:
        if self._exchange is not None:
            self._exchange.cut_off(writer)

    def _refuse(self, check: Check) -> None:
        """These bytes are wrong: a relay's are taken from the trainer, a trainer's are not to be had."""
        arrived = check.arrived
        if self._exchange is None or not self._exchange.distrust(check.writer, arrived.group, arrived.piece):
            self._give_up(
                arrived.ticket,
                f"{self._context.worker}, group {arrived.group}: the bytes from {check.writer} are not those"
                " it sent; send the version again",
            )

    # Apply --------------------------------------------------------------------------------------------

    async def wait_readers(self, after: Event) -> None:
        """Return when writers may begin. Those that write parameters directly do not wait for `after`."""
        if self._is_in_place:
            await after.wait()

    def begin_apply(self, ticket: int, after: Event) -> bool:
        """Write what is there of `ticket` into the parameters, in order, not before `after`.

        True: that was all of it, and `release` is due. Else go on with `apply`.
        """
        if self._is_in_place:
            return False
        self.num_written, self._after = 0, after
        scatters = self._scatters = Scatters(
            self._context.staging,
            stopped=lambda slot: self._perform(self._ring.drained(slot)),
            failed=lambda error: self.abort(ticket, str(error)),
            wants_slots=lambda: self._ring.wants_slots,
        )
        while self.num_written < len(self._groups):
            slot = self._take_ready(ticket, self.num_written)
            if slot is None:
                return False
            self._start(slot, scatters)
        return scatters.close_if_over()

    async def apply(self, ticket: int) -> None:
        """Write the rest, as it lands. Not to be cancelled. `num_written` tells whether the parameters have
        changed when it raises, as it does (`UpdateAborted`) of an aborted ticket; all copies have stopped.
        Either way `release` is due."""
        if self._is_in_place:
            return await self._apply_in_place(ticket)
        scatters, aborted = self._scatters, None
        assert scatters is not None, "an apply goes on before it has begun"
        why, is_cut_short = "an apply was cut short; please report it", False
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(scatters.run)
                try:
                    while self.num_written < len(self._groups):
                        self._start(await self._wait_ready(ticket, self.num_written), scatters)
                except UpdateAborted as exc:
                    aborted = exc
                finally:
                    scatters.close()
        finally:
            if not scatters.is_over:
                is_cut_short = True
                self.abort(ticket, why)
                await scatters.run()  # what was started stops all the same, and its slots are given back
        if error := scatters.error or aborted:
            raise error
        if is_cut_short or self.num_written < len(self._groups):
            self.abort(ticket, why)
            raise InternalError(f"{self._context.worker}: {why}")

    async def rebind(self) -> None:
        """Write parameters where they are now; no `apply` is under way."""
        await anyio.to_thread.run_sync(self._context.staging.rebind)

    def release(self) -> None:
        """Give the slots of the last `apply` back: what its end has to tell comes first."""
        scatters, self._scatters = self._scatters, None
        if scatters is not None:
            scatters.release()

    async def _apply_in_place(self, ticket: int) -> None:
        self.num_written = len(self._groups)  # nobody knows how much is
        for group in self._groups:
            self._perform(self._ring.drained(await self._wait_ready(ticket, group.index)))

    def _start(self, slot: int, scatters: Scatters) -> None:
        """Write the next group."""
        group, after = self._groups[self.num_written], self._after
        self._after = None  # one stream: what waits behind the first copy waits for it too
        then = functools.partial(self._check_again, group) if self._ring.is_shared(slot) else None
        scatters.start(group, slot, after=after, then=then)
        self.num_written += 1

    async def _check_again(self, group: Group) -> None:
        """What is still right was so when it was copied: a relay that is bypassed writes at most once."""
        if not await self._checks.again(group.index):
            raise UpdateAborted(
                f"{self._context.worker}, group {group.index}: a relay that was bypassed has changed bytes"
                " that were found right before; send the version again"
            )

    def _take_ready(self, ticket: int, group: int) -> int | None:
        """Its slot, which is about to be read; None if not all of the group is there."""
        slot = self._ready.pop((ticket, group), None)
        return slot if slot is not None and self._ring.draining(slot, ticket) else None

    async def _wait_ready(self, ticket: int, group: int) -> int:
        while True:
            if (slot := self._take_ready(ticket, group)) is not None:
                return slot
            if ticket in self._aborted:
                raise UpdateAborted(f"ticket {ticket} was aborted: {self._aborted[ticket]}")
            await self._progress.wait()

    def _wake(self) -> None:
        self._progress.set()
        self._progress = Latch()

    # Actions of the ring ------------------------------------------------------------------------------

    def _perform(self, actions: list[RingAction]) -> None:
        for action in actions:
            match action:
                case GiveCredit():
                    self._give_credit(action)
                case GroupReady(ticket, group, slot):
                    self._ready[ticket, group] = slot
                    self._wake()
                case TakeBack():
                    self._fences.send_nowait(functools.partial(self._guard, action))
                case ReplaceSlot(slot):
                    self._context.staging.replace(slot)
                    for buffer in self._context.staging.buffers:
                        self._context.transport.register(buffer)
                    self._perform(self._ring.replaced(slot))
                case ToLeader():
                    self._to_leader(action)
                    is_vacant = isinstance(action.message, Vacant)
                    if is_vacant and self._context.credits_ahead and self._ticket:
                        self._perform(self._ring.expect(self._ticket + 1, self._incoming))

    def _give_credit(self, give: GiveCredit) -> None:
        piece = self._groups[give.group].pieces[give.piece]
        view = self._context.staging.slot_view(give.slot, piece.offset, piece.nbytes)
        remote = self._context.transport.expose(view, give.writer)
        self._exposed.add((give.ticket, give.group, give.piece, give.writer), remote, give.slot)
        credit = Credit(
            give.ticket, give.group, give.piece, give.slot, remote.token, piece.nbytes, self._is_in_place
        )
        self._credits[give.writer].give(credit)
        if self._exchange is not None:
            self._exchange.credited(give.writer, give.group, give.piece)

    async def _guard(self, fence: TakeBack) -> None:
        """Take a quarantined slot back from the transport, or give it new memory after the deadline.

        Parameters have no other memory: they stay tainted until their writers have stopped.
        """
        timeout_s = math.inf if self._is_in_place else self._context.config.fence_timeout_s
        if self._exchange is not None and self._exchange.are_late(fence.writers):
            timeout_s = min(timeout_s, self._context.config.relay_patience_s)
        with anyio.move_on_after(timeout_s):
            for writer in fence.writers:
                if await self._exposed.withdraw(fence.slot, fence.ticket, writer):
                    self._perform(self._ring.taken_back(fence.slot, fence.ticket, writer))
            if not self._ring.is_quarantined(fence.slot):
                return
            await anyio.sleep_forever()  # the writers may still say that they have stopped
        self._perform(self._ring.abandon(fence.slot, fence.ticket))
