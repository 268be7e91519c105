"""Standings: which weights each engine has, from the messages that every trainer rank gets anyway.

The coordinator keeps one for `wbridge status`, each trainer rank one for its application; both are fed
the same messages, and so they agree.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from wbridge.flow.messages import Announced, EngineOutcome, Serve


class EngineStatus(msgspec.Struct, frozen=True):
    """What is known of an engine's weights."""

    engine: str
    live: bool
    """False: the engine, or a worker of it, is gone."""
    version: int | None
    """None: it has applied none yet, or is tainted."""
    lag: int
    """How many versions were announced after the one that it has applied last."""
    tainted: bool
    """Its weights are neither old nor new, and serve nobody until a whole version has landed."""
    ticket: int = 0
    """The attempt that it has applied last; 0: none under this coordinator."""


class Standings:
    """The engines of the current epoch. One thread changes it; any may look."""

    def __init__(self) -> None:
        self._engines: dict[str, EngineStatus] = {}  # without their lags
        self.newest: int = 0
        """The ticket announced last."""
        self.grants: dict[str, tuple[int, int]] = {}
        """The ticket and version that each engine holds and has not finished."""

    def enter(self, engines: Iterable[EngineStatus]) -> None:
        """An epoch begins with these."""
        engines = tuple(engines)
        self.newest = max((engine.ticket + engine.lag for engine in engines), default=self.newest)
        self._engines = {engine.engine: engine for engine in engines}
        self.grants = {}

    def note(self, message: object) -> None:
        """Learn from a message to the trainer ranks; those of other kinds say nothing about engines."""
        match message:
            case Announced():
                self.newest = message.ticket
            case Serve():
                for engine in message.engines:
                    self.grants[engine] = (message.ticket, message.version)
            case EngineOutcome(final=True):
                self._finish(message)

    def lose(self, engine: str) -> None:
        if engine in self._engines:
            self._engines[engine] = msgspec.structs.replace(self._engines[engine], live=False)

    def _finish(self, message: EngineOutcome) -> None:
        granted, version = self.grants.get(message.engine, (None, None))
        if granted == message.ticket:
            del self.grants[message.engine]
        standing = self._engines[message.engine]
        if message.outcome == "applied":
            standing = msgspec.structs.replace(
                standing, version=version, ticket=message.ticket, tainted=False
            )
        elif message.outcome == "tainted":
            standing = msgspec.structs.replace(standing, version=None, tainted=True)
        self._engines[message.engine] = standing

    def view(self) -> dict[str, EngineStatus]:
        """Each engine as it stands now, by name."""
        newest = self.newest
        return {
            name: msgspec.structs.replace(standing, lag=max(0, newest - standing.ticket))
            for name, standing in self._engines.items()
        }

    @property
    def lag(self) -> int:
        """That of the live engine which is furthest behind."""
        return max((engine.lag for engine in self.view().values() if engine.live), default=0)
