"""Patience: whom an engine that stands ready waits for, so that one copy of a version serves them all."""

from __future__ import annotations

from collections.abc import Sequence

from wbridge.flow.actions import StartGrace
from wbridge.flow.records import EngineRecord, TicketRecord


class Patience:
    """Decides when a ticket's first serving set goes; who offers later gets a set of its own, at once.

    An engine is waited for with patience, which begins with the announcement, unless it has let one pass
    since it was served last. From pinned snapshots, one that has an older version to land or apply first, or
    a step to end before it parks, has a *grace*: it begins when others stand ready, and lasts as long as a
    copy takes. If it offers later than that, no grace counts until it has been in time again.
    """

    def __init__(self, *, source_held: bool, lands_when_parked: bool, shares_copies: bool) -> None:
        self._source_held = source_held
        self._lands_when_parked = lands_when_parked
        self._gives_graces = shares_copies and not source_held

    def begin_graces(self, ticket: TicketRecord, absent: Sequence[EngineRecord]) -> list[StartGrace]:
        """Others stand ready for `ticket`: begin the grace of each that is busy.

        Those that nobody waits for have one too: it shows whether they would have been in time.
        """
        if ticket.granted or not self._gives_graces:
            return []
        busy = [e for e in absent if e.grant is not None or self._lands_when_parked]
        return [StartGrace(e.name, e.served) for e in busy if e.begin_grace()]

    def awaited(self, ticket: TicketRecord, absent: Sequence[EngineRecord]) -> list[EngineRecord]:
        """Return whom those that stand ready for `ticket` wait for."""
        return [engine for engine in absent if self._is_awaited(engine, ticket)]

    def _is_awaited(self, engine: EngineRecord, ticket: TicketRecord) -> bool:
        if self._source_held:
            # It is released after this set. So all are waited for, each time if they offer only after the
            # announcement.
            return not ticket.started and (self._lands_when_parked or not engine.misses)
        if engine.grace is not None and not engine.late and not ticket.granted:
            return True
        return not ticket.started and engine.grant is None and not engine.misses


def lets_go(awaited: Sequence[EngineRecord]) -> bool:
    """Whether those that are ready take the next version when all ranks wait for a snapshot for it.

    Served alone they would keep one for as long as a copy takes, and a neighbour in its grace, which may
    still be written, another.
    """
    return any(engine.grace is not None for engine in awaited)
