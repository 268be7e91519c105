"""What `Tickets` remembers of the engines and of each ticket."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from wbridge.flow.messages import Offer, Report


class EngineRecord:
    """A member of the fleet."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.offer: int | None = None
        self.offers_parked = False
        self.grant: int | None = None  # the ticket it holds and has not finished: at most one
        self.lost = False
        self.misses = 0  # tickets whose patience has passed since it was served last
        self.graced: int | None = None  # its grant, if others stand ready for a newer ticket since
        self.in_grace = False  # that grace has not passed
        self.late = False  # it let its last grace pass

    def make_offer(self, offer: Offer) -> None:
        if self.in_grace:
            self.late = False
        self.offer, self.offers_parked, self.graced, self.in_grace = offer.offer, offer.parked, None, False

    def begin_grace(self) -> int | None:
        """Others stand ready for what it wants next: return the ticket that it holds, if this is new."""
        if self.grant is None or self.graced == self.grant:
            return None
        self.graced, self.in_grace = self.grant, True
        return self.grant

    def end_grace(self, ticket: int) -> None:
        """Its time is up, if it still has not offered."""
        if self.in_grace and self.graced == ticket:
            self.in_grace, self.late = False, True


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
