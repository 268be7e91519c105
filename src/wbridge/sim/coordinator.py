"""Coordinator: the real `Tickets` machine, beside trainer rank 0, and the ranks' one send."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from wbridge.errors import InternalError
from wbridge.flow.actions import (
    FromCoordinator,
    StartCallDeadline,
    StartDeadline,
    StartGrace,
    StartPatience,
    TicketsAction,
    To,
    ToCoordinatorMessage,
)
from wbridge.flow.messages import (
    Announced,
    EngineOutcome,
    Finished,
    Landed,
    Offer,
    OfferRefused,
    Report,
    Retired,
    Serve,
    WithdrawOffer,
)
from wbridge.flow.tickets import Tickets
from wbridge.sim.engine import Engine
from wbridge.sim.routing import Routing
from wbridge.sim.world import World
from wbridge.sim.writer import Writer


class Coordinator:
    """Matches the sends of all ranks, grants engines, retires the source."""

    def __init__(
        self,
        world: World,
        ranks: Sequence[int],
        writers: Mapping[int, Writer],
        engines: Mapping[str, tuple[int, Engine]],
        routing: Routing,
    ) -> None:
        """`engines`: each with the worker that leads it."""
        self._routing = routing
        self._world, self._ranks, self._writers, self._engines = world, ranks, writers, engines
        config = world.config
        self._tickets = Tickets(
            num_ranks=len(ranks),
            engines=tuple(engines),
            delivery=config.effective_delivery,
            source_held=config.source_held,
            lands_when_parked=config.lands_when_parked,
        )
        self.outcomes: dict[str, str] = {}

    def report(self, rank: int) -> None:
        """A rank's source is ready."""
        arrives = partial(self._reported, rank)
        self._world.tell(self._ranks[rank], self._ranks[0], arrives)

    def _reported(self, rank: int) -> None:
        self._perform(self._tickets.report(rank, Report(1, 1)))

    def from_leader(self, engine: str, message: ToCoordinatorMessage) -> None:
        leader, _ = self._engines[engine]
        self._world.tell(leader, self._ranks[0], partial(self._from_leader, engine, message))

    def _from_leader(self, engine: str, message: ToCoordinatorMessage) -> None:
        match message:
            case Offer():
                self._perform(self._tickets.offer(engine, message))
            case Landed():
                self._perform(self._tickets.landed(engine, message))
            case Finished():
                self._perform(self._tickets.finished(engine, message))
            case WithdrawOffer():
                self._perform(self._tickets.withdraw_offer(engine, message))

    def _perform(self, actions: Iterable[TicketsAction]) -> None:
        for action in actions:
            match action:
                case To(recipients, message):
                    for recipient in recipients:
                        self._tell(recipient, message)
                case StartPatience(ticket):
                    passed = partial(self._patience_passed, ticket)
                    self._world.timeline.after(self._world.config.relay_patience_s, passed)
                case StartGrace() | StartDeadline() | StartCallDeadline():
                    pass  # one version, for which all wait in their polls; who reads it decides what is long

    def _patience_passed(self, ticket: int) -> None:
        self._perform(self._tickets.patience_passed(ticket))

    def _tell(self, recipient: tuple[str, int] | tuple[str, str], message: FromCoordinator) -> None:
        role, who = recipient
        if role == "rank":
            rank = self._ranks[int(who)]
            self._world.tell(self._ranks[0], rank, partial(self._at_rank, rank, message))
        else:
            leader, engine = self._engines[str(who)]
            self._world.tell(self._ranks[0], leader, partial(self._at_leader, engine, message))

    def _at_rank(self, rank: int, message: FromCoordinator) -> None:
        writer = self._writers[rank]
        match message:
            case Announced(ticket):
                writer.announced(ticket)
            case Serve(ticket, _, engines):
                writer.serve_engines(ticket, engines, self._routing)
            case Retired(ticket):
                writer.retired(ticket)
            case EngineOutcome(_, engine, outcome):
                self.outcomes[engine] = outcome
            case _:
                raise InternalError(f"{message}: nothing is aborted in a simulation; please report it")

    @staticmethod
    def _at_leader(engine: Engine, message: FromCoordinator) -> None:
        match message:
            case Announced() | Serve() | OfferRefused():
                engine.from_coordinator(message)
            case _:
                raise InternalError(f"{message}: nothing is aborted in a simulation; please report it")
