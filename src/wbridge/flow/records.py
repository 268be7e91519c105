"""What `Tickets` remembers of the engines and of each ticket."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from wbridge.flow.messages import Offer, Outcome, Report


class EngineRecord:
    """A member of the fleet."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.offer: int | None = None
        self.offers_parked = False
        self.grant: int | None = None  # the ticket it holds and has not finished: at most one
        self.lost = False
        self.misses = 0  # tickets whose patience has passed since it was served last
        self.served = 0  # the ticket it was granted last
        self.grace: int | None = None  # `served`, while others that stand ready wait for this engine
        self.last_grace = -1  # one for each that it was served
        self.late = False  # it let its last grace pass

    def make_offer(self, offer: Offer) -> None:
        self.offer, self.offers_parked = offer.offer, offer.parked
        if self.grace is not None:
            self.grace, self.late = None, False

    def serve(self, ticket: int) -> None:
        self.offer, self.grant, self.served, self.misses = None, ticket, ticket, 0

    def finish(self, outcome: Outcome) -> None:
        """It is through with its grant. Only who applies a version in time is in time."""
        self.grant = None
        if outcome != "applied" and self.grace is not None:
            self.grace, self.late = None, True

    def begin_grace(self) -> bool:
        """Others stand ready for what it wants next, and it does not; is that new?"""
        is_new = self.last_grace != self.served
        if is_new:
            self.grace = self.last_grace = self.served
        return is_new

    def end_grace(self, served: int) -> None:
        """The time is up; nothing has happened if it has offered meanwhile."""
        if self.grace == served:
            self.grace, self.late = None, True


class Fleet:
    """The engines of an epoch, in an order that stays."""

    def __init__(self, names: Sequence[str]) -> None:
        self._engines = {name: EngineRecord(name) for name in names}

    def __len__(self) -> int:
        return len(self._engines)

    def __iter__(self) -> Iterator[EngineRecord]:
        return iter(self._engines.values())

    def __getitem__(self, name: str) -> EngineRecord:
        return self._engines[name]

    def live(self) -> list[EngineRecord]:
        return [engine for engine in self if not engine.lost]

    def order(self, names: Iterable[str]) -> tuple[str, ...]:
        wanted = set(names)
        return tuple(name for name in self._engines if name in wanted)

    def why_no_offer(self, name: str) -> str:
        """Why an offer of this engine is refused; empty if it is not."""
        engine = self._engines.get(name)
        if engine is None or engine.lost:
            return f"engine {name!r} is not a live member of this epoch"
        if engine.grant is not None:
            return f"engine {name!r} still holds ticket {engine.grant}"
        if engine.offer is not None:
            return f"engine {name!r} has offer {engine.offer} standing"
        return ""


class TicketRecord:
    """One announced version. An engine is in `granted` once it was served, in `final` once it is through."""

    def __init__(self, number: int, report: Report, timer: int) -> None:
        self.number = number
        self.call: int = report.call
        self.version: int = report.version
        self.metadata: bytes = report.metadata
        self.timer = timer  # the ticket whose patience this one shares
        self.started = False  # the first serving set was formed: later offers are served at once
        self.waited = False  # its patience has passed
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
