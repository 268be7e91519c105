"""Patience: whom an engine that stands ready waits for, so that one copy of a version serves them all."""

from __future__ import annotations

from collections.abc import Sequence

from wbridge.flow.records import EngineRecord, TicketRecord


class Patience:
    """Decides when a ticket's first serving set goes; who offers later gets a set of its own, at once.

    An engine is waited for with patience, unless it has let one pass since it was served last. From pinned
    snapshots, one that has an older version to land or apply first is given a *grace* instead, as long as
    its own copy would take; if it offers later than that, it is not waited for until it has been in time.
    """

    def __init__(self, *, source_held: bool, lands_when_parked: bool) -> None:
        self._source_held = source_held
        self._lands_when_parked = lands_when_parked

    def begin_graces(self, ticket: TicketRecord, absent: Sequence[EngineRecord]) -> list[tuple[str, int]]:
        """Others stand ready for `ticket`: return whose grace begins, and what they hold.

        Those that nobody waits for have one too: it shows whether they would have been in time.
        """
        if self._source_held or ticket.granted:
            return []
        begun = [(engine.name, engine.begin_grace()) for engine in absent]
        return [(name, held) for name, held in begun if held is not None]

    def holds_back(
        self,
        ticket: TicketRecord,
        ready: Sequence[EngineRecord],
        absent: Sequence[EngineRecord],
        *,
        pressed: bool,
    ) -> bool:
        """Whether those that are ready wait; `pressed`: all ranks wait for a snapshot in a later call.

        Then whose neighbour is in grace lets this version go, unless it has parked for it: served alone, it
        would keep a snapshot for as long as a copy takes, its neighbour the other one, and both the ranks.
        """
        awaited = [engine for engine in absent if self._is_awaited(engine, ticket)]
        if pressed:
            return any(e.in_grace for e in awaited) and not any(e.offers_parked for e in ready)
        return bool(awaited)

    def _is_awaited(self, engine: EngineRecord, ticket: TicketRecord) -> bool:
        if self._source_held:
            # It is released after this set. So all are waited for, each time if they offer only after the
            # announcement.
            return not ticket.started and (self._lands_when_parked or not engine.misses)
        if engine.in_grace:
            return not engine.late and not ticket.granted
        return not ticket.started and engine.grant is None and not engine.misses
