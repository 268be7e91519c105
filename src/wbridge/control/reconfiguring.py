"""Reconfiguring: the trainer ranks' requests for other job-wide settings meet, and are checked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import anyio
import msgspec

from wbridge.config import Config
from wbridge.control.agreement import Explicit, adopt, check_agreement, check_pins, job_values
from wbridge.control.membership import Member, Membership
from wbridge.control.messages import Reconfigure, Reconfigured
from wbridge.errors import BarrierTimeout, PeerLost, ProtocolError, UpdateAborted, WBridgeError
from wbridge.ids import WorkerId

ORIGIN = "reconfigure()"
"""Where a setting that was changed in a running job comes from."""


class Reconfiguring:
    """The job's settings, and the way from one to the next. Runs in the coordinator's loop."""

    def __init__(self, config: Config, origins: Mapping[str, str]) -> None:
        self.config = config
        self.origins = dict(origins)
        self._asked: dict[Member, tuple[Reconfigure, float]] = {}  # with the deadline
        self._waiting: dict[Member, Reconfigure] = {}  # for the epoch with what they asked for
        self._next: Config | None = None
        self._until_s = math.inf  # how long the ranks wait for that epoch to become possible
        self._lost: dict[WorkerId, str] = {}  # trainer ranks since the last live epoch, and why

    @property
    def is_due(self) -> bool:
        """All ranks have asked for the same, and the next epoch is to have it."""
        return self._next is not None

    def check(self, worker: object, explicit: Explicit) -> None:
        """Compare what a newcomer has set with what the job uses, and is about to use.

        Raises:
            ConfigError: they differ; the message names setting, values and origins.
        """
        check_agreement(worker, explicit, self.config, self.origins)
        if self._next is not None:
            check_pins(worker, explicit, job_values(self._next))

    def ask(self, member: Member, request: Reconfigure, members: Membership) -> None:
        """A rank asks, or takes its request back.

        While a rank is lost, no epoch can come: whoever asks then is told so at once, as those are told
        that had asked before.

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
            member.lease.post(_refusal(request, error))
            return
        present = {other.worker for other in members}
        for worker, reason in self._lost.items():
            if worker not in present:
                member.lease.post(_refusal(request, _lost_error(worker, reason)))
                return
        self._asked[member] = (request, anyio.current_time() + request.patience_s)
        if self._asked.keys() != set(members.trainers() or ()):
            return
        try:
            config = self._check(other for other in members if other.worker.role == "rollout")
        except WBridgeError as exc:
            self._refuse(exc)
            return
        self._until_s = max(deadline_s for _, deadline_s in self._asked.values())
        self._waiting, self._asked = {rank: asked for rank, (asked, _) in self._asked.items()}, {}
        self._next = config  # the same settings too: the epoch that begins finds weights where they are now

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
        self._lost = {}
        if self._next is not None:
            return  # they asked while it opened: theirs is the next one
        for member, request in self._waiting.items():
            member.lease.post(Reconfigured(request.call))
        self._waiting = {}

    def lose(self, member: Member, reason: str) -> None:
        """Without all ranks nothing can be agreed, and no epoch starts."""
        if member.worker.role == "trainer":
            self._asked.pop(member, None)
            self._lost[member.worker] = reason
            self.give_up(_lost_error(member.worker, reason))

    def give_up(self, error: WBridgeError) -> None:
        """What is not changed yet stays as it is: tell those that wait."""
        self._next = None
        self._refuse(error)

    def deadline_s(self) -> float:
        """Until when no epoch has to form, for this."""
        until_s = self._until_s if self.is_due else math.inf
        return min([until_s, *(deadline_s for _, deadline_s in self._asked.values())])

    def expire(self, ranks: tuple[Member, ...], missing: tuple[str, ...]) -> None:
        """Refuse when a rank has waited long enough for others, or all for `missing` to form an epoch."""
        if self.deadline_s() > anyio.current_time():
            return
        if self.is_due:
            text = f"no epoch can begin without {', '.join(missing)}; start them, then reconfigure"
        else:
            silent = tuple(str(rank.worker) for rank in ranks if rank not in self._asked)
            missing = silent or tuple(name for name in missing if name.startswith("trainer"))
            text = f"{', '.join(missing)} did not call reconfigure(); every trainer rank must"
        self.give_up(BarrierTimeout(text, missing))

    def _refuse(self, error: WBridgeError) -> None:
        asked = {member: request for member, (request, _) in self._asked.items()}
        for member, request in (asked | self._waiting).items():
            member.lease.post(_refusal(request, error))
        self._asked, self._waiting = {}, {}


def _lost_error(worker: WorkerId, reason: str) -> PeerLost:
    return PeerLost(f"{worker} is lost: {reason}; connect it again, then reconfigure")


def _refusal(request: Reconfigure, error: WBridgeError) -> Reconfigured:
    missing = error.missing if isinstance(error, BarrierTimeout) else ()
    return Reconfigured(request.call, type(error).__name__, str(error), missing)


def _text(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} = {value!r}" for name, value in sorted(values.items()))
