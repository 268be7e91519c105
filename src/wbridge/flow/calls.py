"""Calls: the trainer ranks' numbered sends meet; a withdrawn number is burnt."""

from __future__ import annotations

from collections.abc import Iterable

from wbridge.flow.actions import FromCoordinator, StartCallDeadline, TicketsAction, To
from wbridge.flow.messages import CallAborted, Report


class Calls:
    """Which rank has begun which call. Part of `Tickets`.

    A call is matched by number, never by version: a version may be sent again, and a withdrawal may
    overtake another rank's report of an earlier try.
    """

    def __init__(self, num_ranks: int) -> None:
        self._live = tuple(range(num_ranks))
        self._reports: dict[int, dict[int, Report]] = {}  # call -> rank -> report
        self._waiting: dict[int, int] = {}  # rank -> the call in which it waits for a snapshot
        self._burnt: dict[int, CallAborted] = {}
        self._told: dict[int, set[int]] = {}  # burnt call -> ranks that know
        self._closed = ""
        self._newest = 0  # every rank makes its calls in order, so all up to here have been begun
        self.announced: dict[int, int] = {}  # call -> ticket
        self.num_ranks = num_ranks

    @property
    def live(self) -> tuple[int, ...]:
        return self._live

    def report(self, rank: int, report: Report) -> tuple[Report | None, list[TicketsAction]]:
        """Return rank 0's report when all ranks have made the call, and what to answer."""
        call = report.call
        self._waiting.pop(rank, None)
        if answer := self._answer_begun(rank, call):
            return None, answer
        if call in self._burnt or call in self.announced:
            return None, []
        reports = self._reports.setdefault(call, {})
        reports[rank] = report
        if len(reports) < self.num_ranks:
            return None, self._begun(call)
        why = _contradiction(reports)
        if why:
            return None, self.burn(call, why, protocol_error=True)
        del self._reports[call]
        return reports[0], []

    def waiting(self, rank: int, call: int) -> list[TicketsAction]:
        """Note that `rank` waits for a snapshot."""
        answer = self._answer_begun(rank, call)
        if call in self._burnt:
            return answer
        self._waiting[rank] = call
        return self._begun(call)

    def all_wait_after(self, call: int) -> bool:
        """Every rank waits for a snapshot in a call later than `call`."""
        return len(self._waiting) == self.num_ranks and all(c > call for c in self._waiting.values())

    def absent(self) -> list[tuple[int, int]]:
        """The ranks that have not begun a call which others have, with its number."""
        begun = {call: set(reports) for call, reports in self._reports.items()}
        for rank, call in self._waiting.items():
            begun.setdefault(call, set()).add(rank)
        return [(rank, call) for call in sorted(begun) for rank in self._live if rank not in begun[call]]

    def deadline_passed(self, call: int) -> list[TicketsAction]:
        """Burn a call that some rank has not begun; the others go on with their next one."""
        missing = tuple(f"trainer rank {rank}" for rank, begun in self.absent() if begun == call)
        if not missing:
            return []
        why = (
            f"{', '.join(missing)} did not make send {call} within update_timeout_s of the others; "
            "every trainer rank must make the same sends: send the next version on all of them, "
            "or raise update_timeout_s"
        )
        return self.burn(call, why, missing=missing)

    def burn(
        self,
        call: int,
        reason: str,
        *,
        canceller: int | None = None,
        protocol_error: bool = False,
        missing: tuple[str, ...] = (),
    ) -> list[TicketsAction]:
        """Burn the number; tell the ranks that have begun it and do not know yet."""
        answer = self._burnt.setdefault(call, CallAborted(call, reason, protocol_error, missing))
        begun = set(self._reports.pop(call, {}))
        begun |= {rank for rank, waits in self._waiting.items() if waits == call}
        if canceller is not None:
            begun.add(canceller)
        told = self._told.setdefault(call, set())
        new = [rank for rank in self._live if rank in begun - told]
        told |= begun
        for rank in begun:
            if self._waiting.get(rank) == call:
                del self._waiting[rank]
        return [to_ranks(new, answer)] if new else []

    def close(self, reason: str, *, lost: int | None = None) -> list[TicketsAction]:
        """Burn every call that is under way and all later ones."""
        self._closed = self._closed or reason
        if lost is not None:
            self._live = tuple(rank for rank in self._live if rank != lost)
        under_way = sorted({*self._reports, *self._waiting.values()})
        return [action for call in under_way for action in self.burn(call, reason)]

    def _begun(self, call: int) -> list[TicketsAction]:
        """A rank has begun a call; the first one starts its deadline."""
        if call <= self._newest or self.num_ranks == 1:
            return []
        self._newest = call
        return [StartCallDeadline(call)]

    def _answer_begun(self, rank: int, call: int) -> list[TicketsAction]:
        """Answer a rank that begins a burnt call, once."""
        if self._closed and call not in self.announced:
            self._burnt.setdefault(call, CallAborted(call, self._closed))
        burnt = self._burnt.get(call)
        told = self._told.setdefault(call, set()) if burnt is not None else set()
        if burnt is None or rank in told:
            return []
        told.add(rank)
        return [to_ranks([rank], burnt)]


def to_ranks(ranks: Iterable[int], message: FromCoordinator) -> To:
    return To(tuple(("rank", rank) for rank in ranks), message)


def _contradiction(reports: dict[int, Report]) -> str:
    versions = {rank: report.version for rank, report in sorted(reports.items())}
    call = reports[0].call
    if len(set(versions.values())) > 1:
        listed = ", ".join(f"rank {rank} sends version {version}" for rank, version in versions.items())
        return f"send {call}: {listed}; every trainer rank must send the same version in the same call"
    nbytes = {rank: len(report.metadata) for rank, report in sorted(reports.items()) if report.metadata}
    if len(set(nbytes.values())) > 1:
        listed = ", ".join(f"rank {rank} gives {n} bytes" for rank, n in nbytes.items())
        return f"send {call} of version {versions[0]}: metadata differs: {listed}; give all ranks the same"
    return ""
