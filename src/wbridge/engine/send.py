"""SendEngine: turns credits into puts, for every ticket this worker serves in one epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import anyio
import anyio.abc

from wbridge.engine.context import SenderContext, close_endpoints
from wbridge.engine.mailer import Mailer, Order
from wbridge.flow.actions import CancelPut, Flush, FreeSource, OutgoingAction, SendStopped, StartPut
from wbridge.flow.messages import Credit, Placed, Serve, TicketAborted
from wbridge.flow.outgoing import Outgoing
from wbridge.plan.types import Piece
from wbridge.staging.base import Source

Key = tuple[str, int, int, int]
"""Receiver, ticket, group, piece."""


class SendEngine:
    """Drives the `Outgoing` machine. `source_free` is called with each ticket whose source nobody reads
    any more."""

    def __init__(self, context: SenderContext, *, source_free: Callable[[int], None]) -> None:
        self._context = context
        self._source_free = source_free
        self._sources: dict[int, Source] = {}
        self._newest = 0
        self._gone: set[str] = set()
        self._credits: dict[Key, Credit] = {}
        self._orders: dict[Key, Order] = {}
        self._pieces: dict[tuple[str, int, int], Piece] = {
            (str(o.receiver), o.group_index, o.piece_index): o.piece for o in context.plan.outgoing
        }
        self._outgoing = Outgoing()
        self._shares = _shares_of(context)
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
        """Write what is credited until cancelled; then nothing reads the weights any more."""
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

    def announce(self, ticket: int, source: Source) -> None:
        """This is what `ticket` consists of, until `source_free` is called with it."""
        self._newest = ticket
        self._sources[ticket] = source
        self._perform(self._outgoing.announced(ticket))

    def serve(self, serve: Serve) -> None:
        """Write to the workers of these engines whatever they give credits for."""
        shares = [share for engine in serve.engines for share in self._shares.get(engine, {}).items()]
        pieces = {receiver: pieces for receiver, pieces in shares if receiver not in self._gone}
        self._perform(self._outgoing.serve(serve.ticket, pieces))

    def credit(self, receiver: str, credit: Credit) -> None:
        """The receiver lets us write a piece. It may overtake announcement and grant."""
        if credit.ticket <= self._newest and credit.ticket not in self._sources:
            return  # that ticket is over
        self._credits[receiver, credit.ticket, credit.group, credit.piece] = credit
        self._perform(self._outgoing.credit(receiver, credit.ticket, credit.group, credit.piece))

    def abort(self, aborted: TicketAborted) -> None:
        """Stop writing to these engines, and tell them when it has stopped."""
        receivers = [r for engine in aborted.engines for r in self._shares.get(engine, ())]
        self._forget_credits(aborted.ticket, receivers)
        self._perform(self._outgoing.aborted(aborted.ticket, receivers))

    def placed(self, receiver: str, placed: Placed) -> None:
        """A receiver on this host lets us write its parameters themselves."""
        self._mailers[receiver].placed(placed)

    def retire(self, ticket: int) -> None:
        """No engine needs the source of `ticket` any more."""
        self._perform(self._outgoing.retired(ticket))

    def withdraw(self, ticket: int) -> None:
        """Stop writing `ticket` to anybody, and free its source when that has stopped."""
        self._forget_credits(ticket, self._mailers)
        self._perform(self._outgoing.aborted(ticket, tuple(self._mailers)))
        self._perform(self._outgoing.retired(ticket))

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
                    if (source := self._sources.pop(ticket, None)) is not None:
                        source.release()
                    self._source_free(ticket)

    def _start(self, receiver: str, ticket: int, group: int, piece: int) -> None:
        key = (receiver, ticket, group, piece)
        order = Order(self._credits.pop(key), self._pieces[receiver, group, piece], self._sources[ticket])
        self._orders[key] = order
        self._mailers[receiver].start(order)

    def _put_ended(self, receiver: str, order: Order) -> None:
        credit = order.credit
        del self._orders[receiver, credit.ticket, credit.group, credit.piece]
        self._perform(self._outgoing.put_ended(receiver, credit.ticket, credit.group, credit.piece))

    def _flushed(self, flush: Flush) -> None:
        self._perform(self._outgoing.flushed(flush.receiver, flush.ticket, flush.group))

    def _lost(self, receiver: str) -> None:
        """The mailer has ended, and with it all its puts."""
        self._gone.add(receiver)
        self._perform(self._outgoing.receiver_lost(receiver))
        for order in [order for key, order in self._orders.items() if key[0] == receiver]:
            self._put_ended(receiver, order)

    def _forget_credits(self, ticket: int, receivers: Iterable[str]) -> None:
        gone = set(receivers)
        for key in [key for key in self._credits if key[0] in gone and key[1] == ticket]:
            del self._credits[key]


def _shares_of(context: SenderContext) -> dict[str, dict[str, list[tuple[int, int]]]]:
    """What this worker writes: engine -> receiver -> (group, piece)."""
    shares: dict[str, dict[str, list[tuple[int, int]]]] = {}
    for o in context.plan.outgoing:
        receivers = shares.setdefault(o.receiver.group, {})
        receivers.setdefault(str(o.receiver), []).append((o.group_index, o.piece_index))
    return shares
