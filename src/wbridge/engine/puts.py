"""Puts: turns credits into puts, for every ticket of which this worker has something to write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import anyio
import anyio.abc

from wbridge.engine.context import WriterContext, close_endpoints
from wbridge.engine.mailer import Mailer, Order
from wbridge.flow.actions import CancelPut, Flush, FreeSource, OutgoingAction, SendStopped, StartPut
from wbridge.flow.messages import Credit, Placed
from wbridge.flow.outgoing import NOTHING, Outgoing
from wbridge.plan.types import Piece
from wbridge.staging.base import Source

Key = tuple[str, int, int, int]
"""Receiver, ticket, group, piece."""

Share = Mapping[str, Iterable[tuple[int, int]]]
"""By receiver: (group, piece)."""

Pieces = Callable[[str, int, int], tuple[Piece, int]]
"""What to write, by receiver, group and piece, and its checksum if that is known, else 0."""


class Puts:
    """Drives the `Outgoing` machine of one epoch.

    `source_free` is called with each ticket whose source nobody reads any more, `put_over` with each put that
    is over, well or not.
    """

    def __init__(
        self,
        context: WriterContext,
        *,
        source_free: Callable[[int], None],
        put_over: Callable[[str, Credit], None] | None = None,
    ) -> None:
        self._context = context
        self._source_free = source_free
        self._put_over = put_over
        self._sources: dict[int, tuple[Source, Pieces]] = {}
        self._newest = 0
        self.gone: set[str] = set()
        """Receivers to which nothing can be written any more."""
        self._credits: dict[Key, Credit] = {}
        self._orders: dict[Key, Order] = {}
        self._outgoing = Outgoing()
        self._mailers = {
            name: Mailer(
                context,
                endpoint,
                put_ended=self._put_ended,
                flushed=self._flushed,
                lost=self._lost,
            )
            for name, endpoint in context.endpoints.items()
        }

    async def run(self) -> None:
        """Write what is credited until cancelled; then nothing reads the sources any more."""
        try:
            async with anyio.create_task_group() as tasks:
                for mailer in self._mailers.values():
                    tasks.start_soon(mailer.run)
                await anyio.sleep_forever()  # also when every receiver is gone: others may be sent to later
        finally:
            try:
                await close_endpoints(self._context)
            finally:
                self._context.staging.close()

    def announce(self, ticket: int, source: Source, pieces: Pieces) -> None:
        """This is what `ticket` consists of, until `source_free` is called with it."""
        self._newest = ticket
        self._sources[ticket] = source, pieces
        self._perform(self._outgoing.announced(ticket))

    def serve(self, ticket: int, pieces: Share, spare: Share = NOTHING) -> None:
        """Write these pieces as they are credited; the spare ones too, if they are."""
        here = {receiver: own for receiver, own in pieces.items() if receiver not in self.gone}
        there = {receiver: own for receiver, own in spare.items() if receiver not in self.gone}
        self._perform(self._outgoing.serve(ticket, here, there))

    def credit(self, receiver: str, credit: Credit) -> None:
        """The receiver lets us write a piece. It may overtake announcement and grant."""
        if credit.ticket <= self._newest and credit.ticket not in self._sources:  # that ticket is over
            self._perform([SendStopped(receiver, credit.ticket, credit.group)])
            return
        self._credits[receiver, credit.ticket, credit.group, credit.piece] = credit
        self._perform(self._outgoing.credit(receiver, credit.ticket, credit.group, credit.piece))

    def abort(self, ticket: int, receivers: Iterable[str]) -> None:
        """Stop writing to these receivers, and tell them when it has stopped."""
        receivers = tuple(receivers)
        self._forget_credits(ticket, receivers)
        self._perform(self._outgoing.aborted(ticket, receivers))

    def tell_stopped(self, receiver: str, ticket: int) -> None:
        """Of a ticket that has not been announced, nothing is written to this receiver."""
        self._perform([SendStopped(receiver, ticket, -1)])

    def placed(self, receiver: str, placed: Placed) -> None:
        """A receiver on this host lets us write its parameters themselves."""
        self._mailers[receiver].placed(placed)

    def retire(self, ticket: int) -> None:
        """Nobody needs the source of `ticket` any more."""
        self._perform(self._outgoing.retired(ticket))

    def withdraw(self, ticket: int) -> None:
        """Stop writing `ticket` to anybody, and free its source when that has stopped."""
        self.abort(ticket, self._mailers)
        self.retire(ticket)

    def lose_receiver(self, receiver: str) -> None:
        """A receiver is gone: nothing more is started for it."""
        if receiver in self._mailers:
            self._mailers[receiver].stop()
            self._perform(self._outgoing.receiver_lost(receiver))

    def _perform(self, actions: list[OutgoingAction]) -> None:
        for action in actions:
            match action:
                case StartPut(receiver, ticket, group, piece):
                    self._start(receiver, ticket, group, piece)
                case CancelPut(receiver, ticket, group, piece):
                    self._mailers[receiver].cancel(self._orders[receiver, ticket, group, piece])
                case Flush(receiver) | SendStopped(receiver):
                    self._mailers[receiver].follow_up(action)
                case FreeSource(ticket):
                    self._forget_credits(ticket, self._mailers)
                    if (known := self._sources.pop(ticket, None)) is not None:
                        known[0].release()
                    self._source_free(ticket)

    def _start(self, receiver: str, ticket: int, group: int, piece: int) -> None:
        key = (receiver, ticket, group, piece)
        source, pieces = self._sources[ticket]
        own, total = pieces(receiver, group, piece)
        order = Order(self._credits.pop(key), own, source, total)
        self._orders[key] = order
        self._mailers[receiver].start(order)

    def _put_ended(self, receiver: str, order: Order) -> None:
        credit = order.credit
        del self._orders[receiver, credit.ticket, credit.group, credit.piece]
        if self._put_over is not None:
            self._put_over(receiver, credit)
        self._perform(self._outgoing.put_ended(receiver, credit.ticket, credit.group, credit.piece))

    def _flushed(self, flush: Flush) -> None:
        self._perform(self._outgoing.flushed(flush.receiver, flush.ticket, flush.group))

    def _lost(self, receiver: str) -> None:
        """The mailer has ended, and with it all its puts."""
        self.gone.add(receiver)
        self._perform(self._outgoing.receiver_lost(receiver))
        for order in [order for key, order in self._orders.items() if key[0] == receiver]:
            self._put_ended(receiver, order)

    def _forget_credits(self, ticket: int, receivers: Iterable[str]) -> None:
        gone = set(receivers)
        for key in [key for key in self._credits if key[0] in gone and key[1] == ticket]:
            del self._credits[key]
