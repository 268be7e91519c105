"""SendEngine: what a trainer writes to whom, for every ticket that it serves in one epoch."""

from __future__ import annotations

from collections.abc import Callable, Coroutine

from wbridge.engine.context import SenderContext
from wbridge.engine.puts import Puts
from wbridge.flow.messages import Credit, Placed, Serve, TicketAborted
from wbridge.ids import WorkerId
from wbridge.plan.routes import iter_hops
from wbridge.plan.types import Piece
from wbridge.staging.base import Source

Share = list[tuple[int, int]]
"""(group, piece) of one receiver."""


class SendEngine:
    """Turns credits into puts. `source_free` is called with each ticket whose source nobody reads."""

    def __init__(self, context: SenderContext, *, source_free: Callable[[int], None]) -> None:
        self._pieces: dict[tuple[str, int, int], Piece] = {
            (str(o.receiver), o.group_index, o.piece_index): o.piece for o in context.plan.outgoing
        }
        self._shares = _shares_of(context)
        self._exchanges = context.plan.exchanges
        self._relayed: dict[tuple[str, ...], dict[str, set[int]]] = {}
        self._puts = Puts(context, source_free=source_free)

    def run(self) -> Coroutine[object, object, None]:
        """Write what is credited until cancelled; then nothing reads the weights any more."""
        return self._puts.run()

    def announce(self, ticket: int, source: Source) -> None:
        """This is what `ticket` consists of, until `source_free` is called with it."""
        self._puts.announce(ticket, source, lambda *key: (self._pieces[key], 0))

    def serve(self, serve: Serve) -> None:
        """Write to the workers of these engines whatever they give credits for.

        What one of them gets from another is only kept ready, should that fail.
        """
        shares = {r: share for engine in serve.engines for r, share in self._shares.get(engine, {}).items()}
        relayed = self._relayed_groups(serve.engines)
        nothing: set[int] = set()
        self._puts.serve(
            serve.ticket,
            {r: [key for key in s if key[0] not in relayed.get(r, nothing)] for r, s in shares.items()},
            {r: [key for key in s if key[0] in relayed[r]] for r, s in shares.items() if r in relayed},
        )

    def _relayed_groups(self, engines: tuple[str, ...]) -> dict[str, set[int]]:
        """By receiver: what it gets from another rollout. Most versions are taken by the same engines."""
        if engines not in self._relayed:
            found: dict[WorkerId, set[int]] = {}
            for hop in iter_hops(self._exchanges, frozenset(engines)):
                found.setdefault(hop.receiver, set()).add(hop.received)
            self._relayed = {engines: {str(receiver): groups for receiver, groups in found.items()}}
        return self._relayed[engines]

    def credit(self, receiver: str, credit: Credit) -> None:
        """The receiver lets us write a piece. It may overtake announcement and grant."""
        self._puts.credit(receiver, credit)

    def abort(self, aborted: TicketAborted) -> None:
        """Stop writing to these engines, and tell them when it has stopped."""
        receivers = [r for engine in aborted.engines for r in self._shares.get(engine, ())]
        self._puts.abort(aborted.ticket, receivers)

    def placed(self, receiver: str, placed: Placed) -> None:
        """A receiver on this host lets us write its parameters themselves."""
        self._puts.placed(receiver, placed)

    def retire(self, ticket: int) -> None:
        """No engine needs the source of `ticket` any more."""
        self._puts.retire(ticket)

    def withdraw(self, ticket: int) -> None:
        """Stop writing `ticket` to anybody, and free its source when that has stopped."""
        self._puts.withdraw(ticket)

    def lose_receiver(self, receiver: str) -> None:
        """A receiver is gone: nothing more is started for it."""
        self._puts.lose_receiver(receiver)


def _shares_of(context: SenderContext) -> dict[str, dict[str, Share]]:
    """What this worker writes: engine -> receiver -> (group, piece)."""
    shares: dict[str, dict[str, Share]] = {}
    for o in context.plan.outgoing:
        receivers = shares.setdefault(o.receiver.group, {})
        receivers.setdefault(str(o.receiver), []).append((o.group_index, o.piece_index))
    return shares
