"""Reconfiguring: the trainer ranks' requests for other job-wide settings meet, and are checked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import anyio
import msgspec

from wbridge.config import Config
from wbridge.control.agreement import adopt, check_pins
from wbridge.control.membership import Member
from wbridge.control.messages import Reconfigure, Reconfigured
from wbridge.errors import BarrierTimeout, PeerLost, ProtocolError, UpdateAborted, WBridgeError

ORIGIN = "reconfigure()"
"""Where a setting that was changed in a running job comes from."""


class Reconfiguring:
    """The job's settings, and the way from one to the next. Runs in the coordinator's loop."""

    def __init__(self, config: Config, origins: Mapping[str, str]) -> None:
        self.config = config
        self.origins = dict(origins)
        self._asked: dict[Member, tuple[Reconfigure, float]] = {}  # with the deadline
        self._waiting: tuple[Member, ...] = ()  # for the epoch with what they asked for
        self._next: Config | None = None

    @property
    def is_due(self) -> bool:
        """All ranks have asked for the same, and the next epoch is to have it."""
        return self._next is not None

    def ask(
        self, member: Member, request: Reconfigure, ranks: tuple[Member, ...], others: Iterable[Member]
    ) -> None:
        """A rank asks, or takes its request back. `ranks` are all of them, `others` the rollouts.

        Raises:
            ProtocolError: a worker asks that is no trainer rank.
        """
        if member.worker.role != "trainer":
            raise ProtocolError(f"{member} asks for other settings, which trainer ranks do")
        if not request.values:
            if member in self._asked:
                del self._asked[member]
                self._refuse(UpdateAborted(f"{member.worker} no longer asks for other settings; ask again"))
            return
        if self._next is not None or self._waiting:
            error = UpdateAborted("the job's settings are being changed already; ask again when they are")
            member.lease.post(_refusal(error))
            return
        self._asked[member] = (request, anyio.current_time() + request.patience_s)
        if len(self._asked) < len(ranks) or not ranks:
            return
        try:
            config = self._check(others)
        except WBridgeError as exc:
            self._refuse(exc)
            return
        self._waiting, self._asked = tuple(self._asked), {}
        if config == self.config:
            self.live()
        else:
            self._next = config

    def _check(self, others: Iterable[Member]) -> Config:
        requests = {member.worker: request.values for member, (request, _) in self._asked.items()}
        (worker, values), *rest = sorted(requests.items())
        for other, others_values in rest:
            if others_values != values:
                raise ProtocolError(
                    f"{worker} asks for {_text(values)}, {other} for {_text(others_values)};"
                    " every trainer rank must call reconfigure() with the same values"
                )
        for member in others:
            check_pins(member.worker, member.hello.explicit, values)
        return adopt(self.config, values)

    def switch(self) -> None:
        """No epoch is live: the next one has what was asked for."""
        if self._next is None:
            return
        before, after = msgspec.to_builtins(self.config), msgspec.to_builtins(self._next)
        self.origins |= {name: ORIGIN for name in after if before[name] != after[name]}
        self.config, self._next = self._next, None

    def live(self) -> None:
        """An epoch with the current settings is live."""
        for member in self._waiting:
            member.lease.post(Reconfigured())
        self._waiting = ()

    def lose(self, member: Member, reason: str) -> None:
        """Without all ranks nothing can be agreed, and no epoch starts."""
        if member.worker.role == "trainer":
            self._asked.pop(member, None)
            self._next = None
            self._refuse(PeerLost(f"{member.worker} is lost: {reason}; connect it again, then reconfigure"))

    def deadline_s(self) -> float:
        return min((deadline_s for _, deadline_s in self._asked.values()), default=math.inf)

    def expire(self, ranks: tuple[Member, ...]) -> None:
        """Refuse when a rank has waited long enough for others."""
        if self.deadline_s() <= anyio.current_time():
            missing = [str(rank.worker) for rank in ranks if rank not in self._asked]
            missing = missing or ["a trainer rank that is not connected"]
            text = f"{', '.join(missing)} did not call reconfigure(); every trainer rank must"
            self._refuse(BarrierTimeout(text, missing))

    def _refuse(self, error: WBridgeError) -> None:
        for member in (*self._asked, *self._waiting):
            member.lease.post(_refusal(error))
        self._asked, self._waiting = {}, ()


def _refusal(error: WBridgeError) -> Reconfigured:
    missing = error.missing if isinstance(error, BarrierTimeout) else ()
    return Reconfigured(type(error).__name__, str(error), missing)


def _text(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} = {value!r}" for name, value in sorted(values.items()))
