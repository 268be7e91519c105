"""What `Tickets` remembers of each engine and of each ticket."""

from __future__ import annotations

from wbridge.flow.messages import Report


class EngineRecord:
    """A member of the fleet."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.offer: int | None = None
        self.grant: int | None = None  # the ticket it holds and has not finished: at most one
        self.lost = False
        self.misses = 0


class TicketRecord:
    """One announced version. An engine is in `granted` once it was served, in `final` once it is through."""

    def __init__(self, number: int, report: Report, timer: int) -> None:
        self.number = number
        self.call: int = report.call
        self.version: int = report.version
        self.metadata: bytes = report.metadata
        self.timer = timer  # the ticket whose patience this one shares
        self.started = False  # the first serving set was formed: later offers are served at once
        self.closed = False  # no further grants
        self.retired = False
        self.granted: set[str] = set()
        self.landed: set[str] = set()
        self.voided: set[str] = set()  # granted, aborted by us, not answered yet
        self.missed: set[str] = set()
        self.final: set[str] = set()

    @property
    def in_flight(self) -> set[str]:
        """Engines that are being written."""
        return self.granted - self.landed - self.voided - self.final

    def waits(self, engine: EngineRecord, to_all: bool) -> bool:
        """Whether `engine` is to do something for this ticket; `to_all`: all are to have it."""
        if engine.name in self.granted:
            return engine.name not in self.final
        return to_all and not self.closed and engine.name not in self.final | self.missed

    @property
    def unfinished(self) -> set[str]:
        return self.granted - self.final
