"""Epochs one after another: form, plan, open, live, end. One task; everything it waits for is an event."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal

import anyio
import anyio.to_thread
import msgspec

from wbridge.config import Config
from wbridge.control.membership import Member, Membership
from wbridge.control.messages import (
    Committed,
    Digested,
    EpochLive,
    EpochReady,
    Keyed,
    Reconfigure,
    Rejected,
    StatusReply,
    Verify,
    WithdrawVerify,
    WorkerLost,
)
from wbridge.control.planning import Planned, Roster, build_planned, epoch_start, joined_of
from wbridge.control.publishing import Cohort, Publishing
from wbridge.control.reconfiguring import Reconfiguring
from wbridge.control.verification import Verifying
from wbridge.errors import BarrierTimeout, UpdateAborted, WBridgeError
from wbridge.flow.standings import EngineStatus, Standings
from wbridge.ids import Epoch

Phase = Literal["forming", "planning", "opening", "live", "ending"]

QUIET_S = 10.0
"""After waiting this long for members, their names are logged once."""

_log = logging.getLogger(__name__)


class Epochs:
    """Drives the membership from epoch to epoch. All methods run in the coordinator's loop."""

    def __init__(self, settings: Reconfiguring, incarnation: int, membership: Membership) -> None:
        self._settings = settings
        self._incarnation = incarnation
        self._membership = membership
        self._changed = anyio.Event()
        self._counter = 0
        self._next_ticket = 1
        self._standings = Standings()
        self._leaders: dict[str, Member] = {}  # of the engines that have been in an epoch
        self._named_missing = False
        self._idle_since_s = 0.0
        self._opening: Cohort | None = None
        self._live: Publishing | None = None
        self._planned: tuple[Roster, Planned] | None = None
        self._verifying = Verifying()
        self.phase: Phase = "forming"

    @property
    def _config(self) -> Config:
        return self._settings.config

    # What happens to members

    def changed(self) -> None:
        """Somebody came, joined, got ready or finished: wake the task."""
        self._changed.set()
        self._changed = anyio.Event()

    def ready(self, member: Member, message: EpochReady) -> None:
        opening = self._opening
        if opening is not None and opening.epoch == message.epoch and member in opening.members:
            opening.ready.add(member)
            opening.num_calls = max(opening.num_calls, message.num_calls or 0)
            self.changed()

    def receive(self, member: Member, keyed: Keyed) -> None:
        """Act on a message of the update protocol; one of another epoch is dropped.

        Raises:
            ProtocolError: nobody in its place says that.
        """
        live = self._live
        if live is not None and live.cohort.epoch == keyed.epoch and member in live.cohort.members:
            if isinstance(keyed.message, Verify | WithdrawVerify | Digested):
                timeout_s = self._config.update_timeout_s
                self._verifying.receive(member, keyed.message, live.cohort, timeout_s=timeout_s)
            else:
                live.receive(member, keyed.message)

    def lose(self, member: Member, reason: str) -> None:
        """A member is gone, or leaves. Everybody it worked with is told."""
        if not self._membership.remove(member):
            return
        if self._opening is not None and member in self._opening.members:
            self._opening.lost.add(member)
            self._opening.tell(WorkerLost(member.worker, reason))
        if self._live is not None and member in self._live.cohort.members:
            self._live.cohort.lost.add(member)
            self._live.cohort.tell(WorkerLost(member.worker, reason))
            self._live.lose(member, reason)
            self._verifying.lose(member, reason)
        self._settings.lose(member, reason)
        self.changed()

    def reconfigure(self, member: Member, request: Reconfigure) -> None:
        """A rank asks for other settings: when all have, a new epoch begins with them."""
        self._settings.ask(member, request, self._membership)
        self.changed()

    def reject(self, member: Member, error: WBridgeError) -> None:
        """End a member's stay with an error that its application sees."""
        missing = error.missing if isinstance(error, BarrierTimeout) else ()
        member.lease.post(Rejected(type(error).__name__, str(error), missing))
        member.lease.finish()
        self.lose(member, f"it was rejected: {error}")

    def status(self) -> StatusReply:
        live = self._live
        return StatusReply(
            epoch=live.cohort.epoch if live is not None else None,
            phase=self.phase,
            members=self._membership.status(),
            engines=tuple(self._standings.view().values()) if live is not None else (),
            announced=live.announced if live is not None else None,
            waiting_for=self.missing() + (live.waiting_for() if live is not None else ()),
        )

    # The one task

    async def run(self) -> None:
        """Run until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._verifying.run)
            while True:
                self.phase = "live" if self._live is not None else "forming"
                roster = await self._form()
                planned = await self._plan(roster)
                if planned is None or not self._still_there(roster):
                    continue
                await self._end()
                self._settings.switch()
                if self._still_there(roster) and await self._open(roster, planned):
                    assert self._live is not None
                    tasks.start_soon(self._live.run)

    async def _form(self) -> Roster:
        """Wait for a complete trainer group and enough engines, and for somebody new or other settings."""
        while (roster := self._complete_roster()) is None:
            with anyio.CancelScope(deadline=self._next_deadline_s()):
                await self._changed.wait()
            self._name_missing()
            self._expire_waiting()
            self._settings.expire(self._membership.trainers() or (), self.missing())
        return roster

    def _complete_roster(self) -> Roster | None:
        ranks, engines = self._membership.trainers(), self._membership.engines()
        if ranks is None or len(engines) < self._num_required():
            return None
        roster = Roster(ranks, engines)
        if self._served().issuperset(roster.members) and not self._settings.is_due:
            return None
        return roster

    def _served(self) -> frozenset[Member]:
        return self._live.cohort.members if self._live is not None else frozenset()

    def _num_required(self) -> int:
        """After the first epoch, a job goes on with the engines it has."""
        return 1 if self._leaders else self._config.num_engines

    def missing(self) -> tuple[str, ...]:
        """Whom the current phase waits for."""
        if self._opening is not None:
            late = self._opening.members - self._opening.ready
            return tuple(sorted(f"{member.worker} (opening epoch)" for member in late))
        return self._membership.missing(self._num_required())

    def _waiting(self) -> list[Member]:
        """Members that have joined and are in no epoch."""
        served = self._served()
        return [m for m in self._membership if m.joined is not None and m not in served]

    def _since_s(self, member: Member) -> float:
        """When this member's wait began: when it joined, or when its last epoch ended."""
        return max(joined_of(member).since_s, self._idle_since_s)

    def _next_deadline_s(self) -> float:
        waiting = self._waiting()
        deadlines = [self._since_s(m) + joined_of(m).patience_s for m in waiting]
        if not self._named_missing:
            deadlines += [self._since_s(m) + QUIET_S for m in waiting]
        return min([*deadlines, self._settings.deadline_s()])

    def _name_missing(self) -> None:
        now_s = anyio.current_time()
        if not self._named_missing and any(self._since_s(m) + QUIET_S <= now_s for m in self._waiting()):
            self._named_missing = True
            _log.info("still waiting for members", extra={"missing": self.missing()})

    def _expire_waiting(self) -> None:
        now_s, missing, waiting = anyio.current_time(), self.missing(), self._waiting()
        late = [m for m in waiting if self._since_s(m) + joined_of(m).patience_s <= now_s]
        trainer = next((m for m in late if m.worker.role == "trainer"), None)
        if trainer is not None and self._live is None:
            # Without it nothing can start, and it may be the one that runs this coordinator.
            error = BarrierTimeout(_late_text(trainer, missing), missing)
            for member in waiting:
                self.reject(member, error)
            return
        for member in late:
            self.reject(member, BarrierTimeout(_late_text(member, missing), missing))

    async def _plan(self, roster: Roster) -> Planned | None:
        """Plan in a worker thread while an old epoch keeps serving. None: the newcomers were rejected."""
        if self._planned is not None and self._planned[0] == roster:
            return self._planned[1]  # other settings do not change who sends what
        self.phase = "planning"
        maps = {member.worker: joined_of(member) for member in roster.members}
        hosts = {member.worker: member.hello.host for member in roster.members}
        try:
            planned = await anyio.to_thread.run_sync(
                build_planned, maps, hosts, self._config, abandon_on_cancel=True
            )
        except WBridgeError as exc:
            newcomers = set(roster.members) - self._served()
            for member in newcomers:
                self.reject(member, exc)
            if not newcomers:  # without one that is gone it is not possible
                self._settings.give_up(exc)
            return None
        self._planned = roster, planned
        return planned

    def _still_there(self, roster: Roster) -> bool:
        return all(member in self._membership for member in roster.members)

    async def _end(self) -> None:
        """Wait until every open grant of the old epoch has committed or aborted, then let go of it.

        An engine that takes longer than `update_timeout_s` is dropped.
        """
        live = self._live
        if live is None:
            return
        self.phase = "ending"
        limit_s = self._config.update_timeout_s
        if self._settings.is_due:  # nothing forces the epoch to end now
            with anyio.move_on_after(limit_s):
                await live.wait_settled()
        live.end("members or settings change: a new epoch begins")
        with anyio.move_on_after(limit_s):
            await live.wait_quiet()
        for engine, (_, version) in list(live.grants.items()):
            text = (
                f"engine {engine!r} still holds version {version}, {limit_s:g} s after its epoch was to end"
            )
            error = BarrierTimeout(f"{text}; poll more often, or raise update_timeout_s", [engine])
            for member in live.cohort.roster.engines[engine]:
                self.reject(member, error)
        live.stop()
        self._verifying.refuse(UpdateAborted("members or settings have changed; verify again"))
        self._next_ticket = live.next_ticket
        self._live = None
        self._idle_since_s = anyio.current_time()

    async def _open(self, roster: Roster, planned: Planned) -> bool:
        """Start the next epoch. False: a member was lost or late, so nothing is live."""
        self.phase = "opening"
        self._counter += 1
        opening = Cohort(Epoch(self._incarnation, self._counter), roster)
        self._opening = opening
        self._standings.enter(standings := self._standings_of(roster))
        for member in roster.members:
            start = epoch_start(opening.epoch, member.worker, roster, planned, self._config)
            member.lease.post(msgspec.structs.replace(start, standings=standings))
        with anyio.move_on_after(self._config.connect_timeout_s):
            await self.wait_until(lambda: opening.is_ready or bool(opening.lost))
        went_well = opening.is_ready and not opening.lost
        if went_well:
            self._go_live(opening, planned)
        elif not opening.lost:
            self._reject_late(opening)
        self._opening = None
        self._idle_since_s = anyio.current_time()
        return went_well

    def _standings_of(self, roster: Roster) -> tuple[EngineStatus, ...]:
        """What is known of the engines, and what newcomers say of themselves."""
        known, newest = self._standings.view(), self._next_ticket - 1
        return tuple(
            known[name]
            if name in known and self._leaders.get(name) is leader
            else _newcomer(name, leader.hello.committed, newest, self._incarnation)
            for name, (leader, *_) in roster.engines.items()
        )

    def _go_live(self, opening: Cohort, planned: Planned) -> None:
        self._named_missing = False
        self._leaders |= {name: leader for name, (leader, *_) in opening.roster.engines.items()}
        self._live = Publishing(
            self._config,
            opening,
            self._standings,
            shares_copies=planned.shares_copies,
            first_ticket=self._next_ticket,
        )
        opening.tell(EpochLive(opening.epoch, opening.num_calls))
        self._settings.live()
        _log.info(
            "epoch is live", extra={"epoch": str(opening.epoch), "engines": len(opening.roster.engines)}
        )

    def _reject_late(self, opening: Cohort) -> None:
        limit_s = self._config.connect_timeout_s
        for member in opening.members - opening.ready:
            name = str(member.worker)
            text = f"{name} was not ready for epoch {opening.epoch} within {limit_s:g} s"
            self.reject(member, BarrierTimeout(f"{text}; raise connect_timeout_s", [name]))

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()


def _newcomer(name: str, committed: Committed | None, newest: int, incarnation: int) -> EngineStatus:
    here = committed is not None and committed.epoch.incarnation == incarnation
    ticket = committed.ticket if committed is not None and here else 0
    version = committed.version if committed is not None else None
    return EngineStatus(name, live=True, version=version, lag=newest - ticket, tainted=False, ticket=ticket)


def _late_text(member: Member, missing: tuple[str, ...]) -> str:
    names = ", ".join(missing) or "the running epoch to end"
    waited = f"{member.worker} waited {joined_of(member).patience_s:g} s for {names}"
    return f"{waited}; start them, or raise connect_timeout_s"
