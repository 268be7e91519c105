"""SendingEpoch: the calls of one trainer worker within one epoch, from snapshot to retirement."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from concurrent.futures import Future

import anyio

from wbridge.control.messages import FlowMessage, Sums, Verified
from wbridge.device.base import Event
from wbridge.engine.context import SenderContext
from wbridge.engine.send import SendEngine
from wbridge.errors import (
    BarrierTimeout,
    InternalError,
    LayoutError,
    ProtocolError,
    UpdateAborted,
    WBridgeError,
)
from wbridge.flow.messages import (
    AbortTicket,
    Announced,
    CallAborted,
    EngineOutcome,
    Overdue,
    Report,
    Retired,
    Serve,
    TicketAborted,
    TooLate,
    Waiting,
    WithdrawCall,
)
from wbridge.session.fence import SourceFence
from wbridge.session.member import first_error
from wbridge.session.publication import Publication
from wbridge.session.verification import Holdings, Verifier
from wbridge.staging.base import Source


class SendingEpoch:
    """Begins the calls, keeps their sources, and turns the coordinator's messages into outcomes."""

    def __init__(
        self,
        context: SenderContext,
        engines: tuple[str, ...],
        *,
        number_call: Callable[[], int],
        check_source: Callable[[], None],
        holdings: Holdings,
        post: Callable[[FlowMessage], None],
        submit: Callable[[Callable[[], Awaitable[None]]], Future[None]],
    ) -> None:
        self.context = context
        self.engine: SendEngine = SendEngine(context, source_free=self._source_free)
        self._engines = engines
        self._check_source = check_source
        self.verifier: Verifier = Verifier(holdings, post)
        self._fence = SourceFence(context.worker, holdings)
        self._post = post
        self._submit = submit
        self._number_call = number_call
        self._by_call: dict[int, Publication] = {}
        self._by_ticket: dict[int, Publication] = {}
        self._unfinished: set[Publication] = set()
        self._ended: WBridgeError | None = None
        self.announced: int | None = None
        """The version that became a ticket last."""

    def begin(self, version: int, metadata: bytes, after: Event) -> Publication | None:
        """Report a call of `send_weights` whose source is there, which is over when that is released. None:
        `send` has to make it."""
        if self._ended is not None or self.context.config.debug_source:
            return None
        source = self.context.staging.snapshot_now(after)
        if source is None:
            return None
        try:
            self._check_source()
        except LayoutError:  # raised again by `send`, which withdraws the call
            source.release()
            return None
        publication = self._number(version)
        publication.source = source
        self._post(Report(publication.call, version, metadata))
        return publication

    def _number(self, version: int) -> Publication:
        publication = Publication(self._number_call(), version, self._engines, self._abort)
        self._by_call[publication.call] = publication
        self._unfinished.add(publication)
        return publication

    async def send(self, version: int, metadata: bytes, after: Event) -> Publication:
        """One call of `send_weights`. Cancelled: withdraws the call and returns once that is answered."""
        if self._ended is not None:
            raise self._ended
        publication = self._number(version)
        try:
            await self._publish(publication, metadata, after)
        except BaseException as exc:  # whatever it is, no other rank waits for this call; raised again
            with anyio.CancelScope(shield=True):
                await self.withdraw(publication)
            if isinstance(exc, BaseExceptionGroup):
                raise first_error(exc) from exc
            raise
        if publication.error is not None:
            raise publication.error
        return publication

    async def _publish(self, publication: Publication, metadata: bytes, after: Event) -> None:
        try:
            self._check_source()
        except LayoutError as exc:
            raise LayoutError(f"{self.context.worker}: version {publication.version}: {exc}") from exc
        staging = self.context.staging
        if not staging.has_free_snapshot:
            self._post(Waiting(publication.call))
        before = await self._fence.take(after) if self.context.config.debug_source else None
        source = await self._snapshot(publication, after)
        if source is None:
            return
        if before is not None and not staging.holds_live_weights:
            await self._check_snapshot(publication, source, before, after)
        if publication.error is not None:
            source.release()
            return
        publication.source = source
        self._post(Report(publication.call, publication.version, metadata))
        if staging.holds_live_weights:
            await publication.released.wait()
            if before is not None and publication.error is None:
                await self._check_delivered(publication, before, after)

    async def _check_snapshot(
        self, publication: Publication, source: Source, before: Sums, after: Event
    ) -> None:
        """If the weights changed under the snapshot, no engine gets it."""
        try:
            publication.error = await self._fence.find_change(publication.version, before, after)
        except BaseException:  # whatever it is, the snapshot is not lost with it; raised again
            source.release()
            raise
        if publication.error is not None:
            self._post(WithdrawCall(publication.call))
            with anyio.move_on_after(self.context.config.coordinator_timeout_s):
                await publication.answered.wait()

    async def _check_delivered(self, publication: Publication, before: Sums, after: Event) -> None:
        """If the weights changed while they were read, no engine applies the version that has not yet."""
        error = await self._fence.find_change(publication.version, before, after)
        if error is not None and publication.ticket is not None:
            self._post(AbortTicket(publication.ticket, str(error)))
            publication.error = error

    async def _snapshot(self, publication: Publication, after: Event) -> Source | None:
        """The source of this call; None if the call ends first."""
        if self.context.staging.holds_live_weights:
            return await self.context.staging.snapshot(after)  # which waits for nothing
        source: Source | None = None
        try:
            async with anyio.create_task_group() as tasks:

                async def give_up() -> None:
                    await publication.released.wait()
                    tasks.cancel_scope.cancel()

                tasks.start_soon(give_up)
                source = await self.context.staging.snapshot(after)
                tasks.cancel_scope.cancel()
        except BaseException:  # whatever it is, the snapshot is not lost with it; raised again
            if source is not None:
                source.release()
            raise
        if source is None and not publication.released.is_set():
            raise InternalError(
                f"{self.context.worker}: version {publication.version} was not taken, since a task of the"
                " adapter was cancelled from outside; please report it"
            )
        return source

    async def withdraw(self, publication: Publication) -> None:
        """Cancel a call, and wait until nothing of it reads the weights any more."""
        self._post(WithdrawCall(publication.call))
        with anyio.move_on_after(self.context.config.coordinator_timeout_s):
            await publication.answered.wait()
        if publication.ticket is None or not self.context.staging.holds_live_weights:
            return
        with anyio.move_on_after(self.context.config.coordinator_timeout_s):
            await publication.released.wait()
            return
        self.engine.withdraw(publication.ticket)  # nobody tells us that it has ended
        await publication.released.wait()

    def _abort(self, publication: Publication) -> Future[None]:
        """The application aborts a version; called in its thread."""
        return self._submit(functools.partial(self._abort_here, publication))

    async def _abort_here(self, publication: Publication) -> None:
        """Return when no engine is being written any more, or will be, whatever became of the version."""
        if publication not in self._unfinished:
            return
        if publication.ticket is None:
            self._post(WithdrawCall(publication.call))
            await publication.answered.wait()
        if publication.ticket is not None:
            self._post(AbortTicket(publication.ticket, "the application aborted it"))
        await publication.over.wait()

    # Messages of the coordinator -----------------------------------------------------------------------

    def receive(self, message: FlowMessage) -> None:
        match message:
            case Verified():
                self.verifier.answer(message)
            case Announced():
                self._announced(message)
            case Serve():
                self.engine.serve(message)
            case TicketAborted():
                self._ticket_aborted(message)
            case Retired(ticket):
                if (publication := self._by_ticket.get(ticket)) is not None:
                    publication.retire()
                self.engine.retire(ticket)
            case EngineOutcome():
                self._outcome(message)
            case Overdue():
                self._overdue(message)
            case CallAborted():
                self._call_aborted(message)
            case TooLate():
                return  # the announcement before it has said so

    def _announced(self, message: Announced) -> None:
        publication = self._by_call.pop(message.call)
        publication.ticket = message.ticket
        publication.answered.set()
        self._by_ticket[message.ticket] = publication
        self.announced = publication.version
        assert publication.source is not None, "announced before it was reported"
        self.engine.announce(message.ticket, publication.source)

    def _call_aborted(self, message: CallAborted) -> None:
        publication = self._by_call.pop(message.call, None)
        if publication is None:
            return
        text = f"version {publication.version}: {message.reason}"
        if message.missing:
            self._fail(publication, BarrierTimeout(text, message.missing))
        else:
            self._fail(publication, ProtocolError(text) if message.protocol_error else UpdateAborted(text))

    def _ticket_aborted(self, message: TicketAborted) -> None:
        self.engine.abort(message)
        publication = self._by_ticket.get(message.ticket)
        if message.everywhere and publication is not None:
            # Its source may still be read; `released` follows when that has stopped.
            publication.fail(UpdateAborted(f"version {publication.version}: {message.reason}"))

    def _outcome(self, message: EngineOutcome) -> None:
        publication = self._by_ticket.get(message.ticket)
        if publication is not None:
            publication.note(message)
            if publication.is_over and publication.released.is_set():
                self._forget(publication)

    def _overdue(self, message: Overdue) -> None:
        publication = self._by_ticket.get(message.ticket)
        if publication is not None:
            publication.error = BarrierTimeout(
                f"version {publication.version} (ticket {message.ticket}): {message.reason}", message.missing
            )

    def _source_free(self, ticket: int) -> None:
        publication = self._by_ticket.get(ticket)
        if publication is not None:
            publication.release()
            if publication.is_over:
                self._forget(publication)

    def _fail(self, publication: Publication, error: WBridgeError) -> None:
        if publication.source is not None:
            publication.source.release()
        publication.fail(error)
        publication.release()
        self._forget(publication)

    def _forget(self, publication: Publication) -> None:
        self._unfinished.discard(publication)
        self._by_call.pop(publication.call, None)
        if publication.ticket is not None:
            self._by_ticket.pop(publication.ticket, None)
        publication.let_go()

    def end(self, error: WBridgeError) -> None:
        """The epoch is over and nothing of it runs any more: what is unfinished fails with `error`."""
        self._ended = error
        self.verifier.end(error)
        for publication in tuple(self._unfinished):
            self._fail(publication, error)
