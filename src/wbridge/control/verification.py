"""Verifying: the digests of all ranks and all rollout workers meet here, and are compared."""

from __future__ import annotations

import math
from collections.abc import Mapping

import anyio
import msgspec

from wbridge.control.membership import Member
from wbridge.control.messages import (
    CheckOutcome,
    Difference,
    Digested,
    EngineCheck,
    Keyed,
    Sums,
    TakeDigest,
    Verification,
    Verified,
    Verify,
    WithdrawVerify,
)
from wbridge.control.publishing import Cohort
from wbridge.errors import BarrierTimeout, PeerLost, ProtocolError, WBridgeError


class _Asked(msgspec.Struct, frozen=True):
    request: Verify
    deadline_s: float


class _Round:
    """All ranks have asked; the rollout workers are asked in turn."""

    def __init__(self, number: int, cohort: Cohort, asked: dict[Member, Verify], deadline_s: float) -> None:
        self.number = number
        self.cohort = cohort
        self.asked = asked
        self.deadline_s = deadline_s
        self.lost: dict[str, str] = {m.worker.group: "it is gone" for m in cohort.lost}
        self.replies: dict[Member, Digested] = {}
        self.sent: Sums = {}
        for request in asked.values():
            for receiver, sums in request.sums.items():
                total = self.sent.setdefault(receiver, {})
                for tensor, value in sums.items():
                    total[tensor] = (total.get(tensor, 0) + value) % 2**64

    def late(self) -> list[Member]:
        """The workers of live engines that have not answered."""
        engines = self.cohort.roster.engines.items()
        return [
            m for name, members in engines if name not in self.lost for m in members if m not in self.replies
        ]

    def result(self) -> Verification:
        version = next(iter(self.asked.values())).version
        engines = sorted(self.cohort.roster.engines.items())
        return Verification(version, tuple(self._check(name, members, version) for name, members in engines))

    def _check(self, engine: str, members: tuple[Member, ...], version: int | None) -> EngineCheck:
        if engine in self.lost:
            return EngineCheck(engine, "lost", reason=self.lost[engine])
        replies = {member: self.replies[member] for member in members}
        for member, reply in replies.items():
            if reply.failed:
                failure: CheckOutcome = "tainted" if reply.is_tainted else "unverifiable"
                return EngineCheck(engine, failure, reason=f"{member.worker}: {reply.failed}")
        held, *others = {reply.version for reply in replies.values()}
        if others:
            return EngineCheck(engine, "other_version", reason="it took a version meanwhile; verify again")
        if held != version:
            why = f"it holds version {held}, the trainer's last is {version}"
            return EngineCheck(engine, "other_version", held, why)
        different = tuple(
            Difference(member.worker, tensor)
            for member, reply in replies.items()
            for tensor in _different(self.sent.get(str(member.worker), {}), reply.sums)
        )
        unverifiable = tuple(u for reply in replies.values() for u in reply.unverifiable)
        outcome: CheckOutcome = "different" if different else "unverifiable" if unverifiable else "equal"
        return EngineCheck(engine, outcome, version, "", different, unverifiable)


def _without(rank: Member, reason: str) -> PeerLost:
    return PeerLost(f"{rank.worker} is lost: {reason}; connect it again, then verify")


def _different(sent: dict[str, int], held: dict[str, int]) -> list[str]:
    return [tensor for tensor in sorted(sent.keys() | held.keys()) if sent.get(tensor) != held.get(tensor)]


class Verifying:
    """One round of `verify()` after another. All methods run in the coordinator's loop."""

    def __init__(self) -> None:
        self._asked: dict[Member, _Asked] = {}
        self._round: _Round | None = None
        self._cohort: Cohort | None = None
        self._number = 0
        self._changed = anyio.Event()

    def receive(
        self, member: Member, message: Verify | WithdrawVerify | Digested, cohort: Cohort, *, timeout_s: float
    ) -> None:
        """Act on a member's message of the live epoch.

        Raises:
            ProtocolError: nobody in its place says that.
        """
        if (member.worker.role == "rollout") != isinstance(message, Digested):
            raise ProtocolError(f"{member} sent {type(message).__name__}, which the other role sends")
        self._cohort = cohort
        if isinstance(message, Verify):
            self._asked[member] = _Asked(message, anyio.current_time() + timeout_s)
            self._begin(cohort)
        elif isinstance(message, WithdrawVerify):
            self._asked.pop(member, None)
        elif self._round is not None and message.round == self._round.number:
            self._round.replies[member] = message
            self._finish_if_complete(self._round)
        self._wake()

    def lose(self, member: Member, reason: str) -> None:
        """Without a rank nothing can be compared; an engine is lost as a whole."""
        if member.worker.role == "trainer":
            self.refuse(_without(member, reason))
        elif self._round is not None:
            self._round.lost.setdefault(member.worker.group, f"{member.worker}: {reason}")
            self._finish_if_complete(self._round)

    def refuse(self, error: WBridgeError) -> None:
        """There is no result: tell all ranks that have asked."""
        if self._round is None and not self._asked:
            return
        missing = error.missing if isinstance(error, BarrierTimeout) else ()
        asked = {member: asked.request for member, asked in self._asked.items()}
        if self._round is not None:
            self._answer(self._round.asked, Verified(0, None, type(error).__name__, str(error), missing))
        self._answer(asked, Verified(0, None, type(error).__name__, str(error), missing))
        self._asked, self._round = {}, None

    async def run(self) -> None:
        """Keep the time until cancelled."""
        while True:
            with anyio.CancelScope(deadline=self._deadline_s()):
                await self._changed.wait()
            if self._deadline_s() <= anyio.current_time():
                self._expire()

    def _begin(self, cohort: Cohort) -> None:
        ranks = cohort.roster.ranks
        if gone := [rank for rank in ranks if rank in cohort.lost]:
            self.refuse(_without(gone[0], "it is gone"))
        if self._round is not None or any(rank not in self._asked for rank in ranks):
            return
        asked = {rank: self._asked.pop(rank) for rank in ranks}
        self._number += 1
        requests = {rank: each.request for rank, each in asked.items()}
        deadline_s = max(each.deadline_s for each in asked.values())  # the one that asked last
        begun = self._round = _Round(self._number, cohort, requests, deadline_s)
        versions = {str(rank.worker): request.version for rank, request in requests.items()}
        if len(set(versions.values())) > 1:
            self.refuse(ProtocolError(f"the ranks sent different versions last: {versions}"))
            return
        for member in begun.late():
            member.lease.post(Keyed(cohort.epoch, TakeDigest(self._number)))
        self._finish_if_complete(begun)

    def _finish_if_complete(self, begun: _Round) -> None:
        if begun.late():
            return
        self._round = None
        self._answer(begun.asked, Verified(0, begun.result()))
        self._begin(begun.cohort)

    def _answer(self, asked: Mapping[Member, Verify], answer: Verified) -> None:
        assert self._cohort is not None, "somebody has asked"
        for member, request in asked.items():
            if member not in self._cohort.lost:
                personal = msgspec.structs.replace(answer, call=request.call)
                member.lease.post(Keyed(self._cohort.epoch, personal))

    def _deadline_s(self) -> float:
        deadlines = [asked.deadline_s for asked in self._asked.values()]
        return min([*deadlines, self._round.deadline_s if self._round else math.inf])

    def _expire(self) -> None:
        if self._round is not None and self._round.deadline_s <= anyio.current_time():
            missing, what = self._round.late(), "did not send its digests in time"
        else:
            ranks = self._cohort.roster.ranks if self._cohort else ()
            missing = [rank for rank in ranks if rank not in self._asked]
            what = "did not call verify(); every trainer rank must"
        names = [str(member.worker) for member in missing]
        self.refuse(BarrierTimeout(f"{', '.join(names)} {what}", names))

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
