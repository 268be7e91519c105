"""Calls: the trainer ranks' numbered sends meet; a withdrawn number is burnt."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from wbridge.flow.actions import FromCoordinator, Recipient, StartCallDeadline, TicketsAction, To
from wbridge.flow.messages import Announced, CallAborted, Report

_BEFORE = "of another trainer rank has ended with an earlier epoch; send the version again"


class Calls:
    """Which rank has begun which call. Part of `Tickets`.

    A call is matched by number, never by version: a version may be sent again, and a withdrawal may
    overtake another rank's report of an earlier try. For the same reason a rank goes on counting in the
    next epoch, and the first `num_calls` calls are burnt: some rank has begun them in an earlier epoch, and
    they have ended with that.

    An epoch that ends may fail a send on one rank, which repeats it, and the version alone on another, which
    goes on. So before the first ticket of a later epoch, a rank that sends an older version than another
    skips it, and its later calls count one less. What a call counts and the number it has on its rank may
    differ from then on.
    """

    def __init__(self, num_ranks: int, num_calls: int = 0) -> None:
        self._live = tuple(range(num_ranks))
        self._reports: dict[int, dict[int, Report]] = {}  # call -> rank -> report
        self._waiting: dict[int, int] = {}  # rank -> the call in which it waits for a snapshot
        self._burnt: dict[int, CallAborted] = {}
        self._told: dict[int, set[int]] = {}  # burnt call -> ranks that know
        self._closed = ""
        self._num_before = num_calls
        self._skipped: dict[int, list[int]] = {rank: [] for rank in self._live}  # numbers, ascending
        self._newest = num_calls  # every rank makes its calls in order, so all up to here have been begun
        self.announced: dict[int, int] = {}  # call -> ticket
        self.num_ranks = num_ranks

    @property
    def live(self) -> tuple[int, ...]:
        return self._live

    def report(self, rank: int, report: Report) -> tuple[Report | None, list[TicketsAction]]:
        """Return rank 0's report when all ranks have made the call, and what to answer."""
        if self.has_skipped(rank, report.call):
            return None, []
        call = self.count(rank, report.call)
        if self._waiting.get(rank, call + 1) <= call:
            del self._waiting[rank]
        if answer := self._answer_begun(rank, call):
            return None, answer
        if call in self._burnt or call in self.announced:
            return None, []
        reports = self._reports.setdefault(call, {})
        reports[rank] = report
        out = self._begun(call)
        while len(reports) == self.num_ranks and self._may_skip(call) and (behind := _behind(reports)):
            for each in behind:
                out += self._skip(each, call, max(r.version for r in reports.values()))
        if len(reports) < self.num_ranks:
            return None, out
        why = _contradiction(reports)
        if why:
            return None, out + self.burn(call, why, protocol_error=True)
        del self._reports[call]
        return msgspec.structs.replace(reports[0], call=call), out

    def has_skipped(self, rank: int, number: int) -> bool:
        """This call has come to nothing, as the rank has been told."""
        return number in self._skipped[rank]

    def count(self, rank: int, number: int) -> int:
        """What this rank's call with this number counts."""
        return number - sum(skipped < number for skipped in self._skipped[rank])

    def _number(self, rank: int, call: int) -> int:
        """The rank's own number of a call."""
        for skipped in self._skipped[rank]:
            call += skipped <= call
        return call

    def tell(
        self, ranks: Iterable[int], message: Announced | CallAborted, leaders: Iterable[Recipient] = ()
    ) -> list[TicketsAction]:
        """Name the call to each of these ranks by the rank's own number."""
        to: dict[int, list[Recipient]] = {}
        for rank in ranks:
            to.setdefault(self._number(rank, message.call), []).append(("rank", rank))
        for leader in leaders:
            to[min(to)].append(leader)
        return [To(tuple(same), msgspec.structs.replace(message, call=n)) for n, same in to.items()]

    def _may_skip(self, call: int) -> bool:
        return bool(self._num_before) and not self.announced and max(self._burnt, default=0) < call

    def _skip(self, rank: int, call: int, version: int) -> list[TicketsAction]:
        """This call of one rank comes to nothing, and its next one, which may have begun, takes its place."""
        skipped = self._reports[call].pop(rank)
        for later in sorted(c for c, reports in self._reports.items() if c > call and rank in reports):
            self._reports.setdefault(later - 1, {})[rank] = self._reports[later].pop(rank)
        self._reports = {c: reports for c, reports in self._reports.items() if reports or c == call}
        if self._waiting.get(rank, 0) > call:
            self._waiting[rank] -= 1
        self._skipped[rank].append(skipped.call)
        self._newest = max([*self._reports, *self._waiting.values()])
        why = f"other trainer ranks send version {version} already; go on with that"
        return [to_ranks([rank], CallAborted(skipped.call, why))]

    def waiting(self, rank: int, number: int) -> list[TicketsAction]:
        """Note that `rank` waits for a snapshot."""
        if self.has_skipped(rank, number):
            return []
        call = self.count(rank, number)
        answer = self._answer_begun(rank, call)
        if call in self._burnt:
            return answer
        self._waiting[rank] = call
        return self._begun(call)

    def all_wait_after(self, call: int) -> bool:
        """Every rank waits for a snapshot in a call later than `call`."""
        return len(self._waiting) == self.num_ranks and all(c > call for c in self._waiting.values())

    def all_in_next(self) -> bool:
        """Every rank has begun the next call: it becomes a ticket when they have their snapshots."""
        begun = [*self._reports, *self._waiting.values()]
        return bool(begun) and all(call > min(begun) for _, call in self.absent())

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
        return self.tell(new, answer)

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
        if call <= self._num_before:
            self._burnt.setdefault(call, CallAborted(call, f"send {call} {_BEFORE}"))
        burnt = self._burnt.get(call)
        told = self._told.setdefault(call, set()) if burnt is not None else set()
        if burnt is None or rank in told:
            return []
        told.add(rank)
        return self.tell([rank], burnt)


def to_ranks(ranks: Iterable[int], message: FromCoordinator) -> To:
    return To(tuple(("rank", rank) for rank in ranks), message)


def _behind(reports: dict[int, Report]) -> list[int]:
    """The ranks that send an older version than another."""
    newest = max(report.version for report in reports.values())
    return [rank for rank, report in sorted(reports.items()) if report.version < newest]


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
