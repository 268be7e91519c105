"""Lockstep: drives the leader and follower machines of one engine over its own connections."""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Literal, Protocol

import anyio
import anyio.abc
import msgspec

from wbridge.config import Config
from wbridge.control.messages import FlowMessage, Follow, Keyed
from wbridge.engine.link import EngineLink, Frame
from wbridge.errors import EndpointClosed
from wbridge.flow.actions import (
    Apply,
    EngineBroken,
    FollowerAction,
    LeaderAction,
    Leave,
    PollFails,
    RunBeforeApply,
    Separated,
    StartGrantTimer,
    StartHoldTimer,
    ToCoordinator,
    ToCoordinatorMessage,
    ToLeader,
    ToWorkers,
    Unpark,
)
from wbridge.flow.follower import Follower
from wbridge.flow.leader import Leader
from wbridge.flow.messages import (
    Announced,
    Commit,
    Done,
    Hold,
    Landed,
    Meet,
    OfferRefused,
    Promise,
    Ready,
    Refuse,
    Release,
    Serve,
    TicketAborted,
    Vacant,
    WithdrawHold,
    WorkerApplied,
)
from wbridge.ids import Epoch, WorkerId


class Written(msgspec.Struct, frozen=True):
    """The slots are in the parameters: run what the backend does then, and call `applied`."""

    hold: int


Instruction = RunBeforeApply | Written | Leave | Unpark | PollFails
"""What the loop thread tells the parked poll."""


class Worker(Protocol):
    """What the lockstep asks of the worker it belongs to."""

    def serve(self, serve: Serve) -> None: ...

    def abort(self, aborted: TicketAborted) -> None: ...

    def apply(self, apply: Apply) -> None:
        """Start to apply; `Lockstep.written` or `Lockstep.apply_ended` is due when the copies have ended."""
        ...

    def engine_broken(self, reason: str) -> None:
        """Wait for no more bytes: nobody says any more what becomes of a grant."""
        ...

    def to_coordinator(self, *messages: FlowMessage) -> None: ...


class Lockstep:
    """One worker's share of its engine's agreement. Lasts as long as the adapter, over all epochs.

    All methods run in the loop thread. `follower` has the two attributes of the fast path.
    """

    def __init__(self, worker_id: WorkerId, config: Config, *, secret: bytes, worker: Worker) -> None:
        self._config = config
        self._worker = worker
        self._num_workers = worker_id.group_size
        self._epoch: Epoch | None = None
        self.follower: Follower = Follower()
        self._leader: Leader | None = None
        if worker_id.is_leader:
            self._leader = Leader(
                self._num_workers,
                lands_when_parked=config.lands_when_parked,
                max_poll_skew=config.max_poll_skew,
            )
        self._link = EngineLink(
            worker_id, secret=secret, heartbeat_s=config.heartbeat_s, deliver=self._delivered, lost=self._lost
        )
        self._tasks: anyio.abc.TaskGroup | None = None
        self._hold_timer: asyncio.TimerHandle | None = None
        # Messages between the machines of this very worker wait here, so that a machine's actions are
        # all performed before it gets the next event.
        self._own: deque[Callable[[], None]] = deque()
        self._to_tell: list[ToCoordinatorMessage] = []  # the coordinator, behind what a poll here waits for
        self._draining = False
        self._instructions: deque[Instruction] = deque()
        self._answer: Future[Instruction] | None = None  # the poll waits for it
        self._changed = anyio.Event()
        self._is_separated = False
        self._follow: Epoch | None = None
        self._broken = ""

    # Life ----------------------------------------------------------------------------------------------

    async def open(self, tasks: anyio.abc.TaskGroup, host: str) -> str:
        """Return the address at which the other workers of the engine reach the leader; empty for them."""
        self._tasks = tasks
        if self._leader is None or self._num_workers == 1:
            return ""
        return await self._link.listen(tasks, host)

    async def enter(self, epoch: Epoch, leader_address: str, config: Config) -> None:
        """Go into an epoch as one engine: nothing of the old one is under way afterwards.

        Cancelled: as if not called. The next call may be for another epoch.

        Raises:
            EndpointClosed: a worker of this engine is lost, and the engine with it.
            PeerLost: the leader does not answer at its address.
        """
        assert self._tasks is not None
        if self._leader is not None:
            await self._link.wait_complete()
            self._check_whole()
            if self._epoch is not None:
                self._is_separated = False
                self._from_leader(self._leader.leave())
                await self._until(lambda: self._is_separated)
            self._leader.enter(lands_when_parked=config.lands_when_parked)
            for rank in range(1, self._num_workers):
                self._link.post(rank, Follow(epoch))
        else:
            await self._link.join(self._tasks, leader_address, epoch)
            await self._until(lambda: self._follow == epoch)
        self._epoch, self._config = epoch, config

    def close(self, reason: str) -> None:
        """End the connections inside the engine. A poll that is parked now, and each later one, fails."""
        self._link.close()
        self._break(reason)

    def _break(self, reason: str) -> None:
        """This worker belongs to no engine any more."""
        self._broken = self._broken or reason
        self._from_follower(self.follower.leader_lost(reason))
        self._worker.engine_broken(reason)
        self._note_change()

    def _check_whole(self) -> None:
        if self._broken:
            raise EndpointClosed(f"{self._broken}; close this adapter and connect the whole engine again")

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._check_whole()
            await self._changed.wait()

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    # The caller's poll ---------------------------------------------------------------------------------

    # Those that take an `answer` have the next instruction set there, now or later.

    def poll(self, answer: Future[Instruction], *, wait: bool) -> None:
        """Hand a counted poll over; if it is to `wait` for an update, until `wait_over`."""
        self._instructions.clear()  # of a poll that failed before it could follow them
        self._from_follower(self.follower.poll(wait=wait))
        self._answer_with(answer)

    def wait_over(self) -> None:
        self._from_follower(self.follower.wait_over())

    def cancel_poll(self) -> None:
        self._from_follower(self.follower.cancelled())

    def before_apply_done(self, answer: Future[Instruction], hold: int) -> None:
        self._from_follower(self.follower.before_apply_done(hold))
        self._answer_with(answer)

    def refused(self, answer: Future[Instruction], hold: int, reason: str) -> None:
        self._from_follower(self.follower.refused(hold, reason))
        self._answer_with(answer)

    def applied(self, answer: Future[Instruction], hold: int, failure: str) -> None:
        """The backend has done its part, or failed: then the parameters are neither old nor new."""
        self._from_follower(self.follower.applied(hold, "tainted" if failure else "applied", failure))
        self._answer_with(answer)

    async def wait_instruction(self) -> None:
        """Return when there is an instruction for the poll, which stays there."""
        while not self._instructions:
            await self._changed.wait()

    def _instruct(self, instruction: Instruction) -> None:
        if self._answer is None:
            self._instructions.append(instruction)
            self._note_change()
        else:
            answer, self._answer = self._answer, None
            answer.set_result(instruction)

    def _answer_with(self, answer: Future[Instruction]) -> None:
        if self._instructions:
            answer.set_result(self._instructions.popleft())
        else:
            self._answer = answer

    # The worker's apply --------------------------------------------------------------------------------

    def written(self, hold: int) -> None:
        """The parameters are written; the parked poll has to do the rest."""
        self._instruct(Written(hold))

    def apply_ended(
        self, hold: int, outcome: Literal["applied", "aborted", "tainted"], detail: str = ""
    ) -> None:
        """There is nothing left to do for the poll."""
        self._from_follower(self.follower.applied(hold, outcome, detail))

    # Events from outside the engine --------------------------------------------------------------------

    def from_coordinator(self, message: FlowMessage) -> None:
        """The leader's part of the coordinator's messages; others get none."""
        if self._leader is None:
            return
        match message:
            case Announced():
                self._from_leader(self._leader.announced(message))
            case Serve():
                self._from_leader(self._leader.serve(message))
            case OfferRefused():
                self._from_leader(self._leader.refused(message))
            case TicketAborted():
                self._from_leader(self._leader.ticket_aborted(message))

    def coordinator_lost(self) -> None:
        if self._leader is not None:
            self._from_leader(self._leader.coordinator_lost())

    def from_ring(self, action: ToLeader) -> None:
        """The ring has landed a ticket, or is vacant."""
        self._from_follower([action])

    def give_up(self, ticket: int, reason: str) -> None:
        """This worker cannot land its grant. The leader ends it as if the coordinator had aborted it."""
        aborted = TicketAborted(ticket, (), reason)
        if self._leader is None:
            self._post(0, aborted)
        else:
            self._later(self._to_leader, 0, aborted)
            self._run_own()

    def _lost(self, rank: int, reason: str) -> None:
        if self._leader is not None:
            self._from_leader(self._leader.worker_lost(rank, reason))
        else:
            self._break(f"the leader of this engine is lost: {reason}")

    # Messages inside the engine ------------------------------------------------------------------------

    def _delivered(self, rank: int, frame: Frame) -> None:
        if isinstance(frame, Follow):
            self._follow = frame.epoch
            self._note_change()
        elif frame.epoch != self._epoch:
            return  # of the membership before
        elif self._leader is not None:
            self._to_leader(rank, frame.message)
        else:
            self._to_worker(frame.message)

    def _to_leader(self, rank: int, message: FlowMessage) -> None:
        leader = self._leader
        assert leader is not None
        match message:
            case Promise():
                self._from_leader(leader.promise(rank, message))
            case Ready():
                self._from_leader(leader.ready(rank, message))
            case Refuse():
                self._from_leader(leader.refuse(rank, message))
            case WithdrawHold():
                self._from_leader(leader.withdraw(rank, message))
            case WorkerApplied():
                self._from_leader(leader.applied(rank, message))
            case Landed():
                self._from_leader(leader.landed(rank, message))
            case Vacant():
                self._from_leader(leader.vacant(rank, message))
            case TicketAborted():
                self._from_leader(leader.ticket_aborted(message))

    def _to_worker(self, message: FlowMessage) -> None:
        match message:
            case Serve():
                self._worker.serve(message)
            case TicketAborted():
                self._worker.abort(message)
            case Hold() | Meet() | Commit() | Done() | Release():
                self._from_follower(self.follower.message(message))

    # Actions -------------------------------------------------------------------------------------------

    def _from_leader(self, actions: list[LeaderAction]) -> None:
        assert self._tasks is not None
        for action in actions:
            match action:
                case ToWorkers(message):
                    for rank in range(1, self._num_workers):
                        self._post(rank, message)
                    self._later(self._to_worker, message)
                case ToCoordinator(message):
                    self._to_tell.append(message)
                case StartGrantTimer(ticket):
                    self._tasks.start_soon(self._time_grant, ticket, self._epoch)
                case EngineBroken(reason):
                    self._later(self.close, reason)  # behind the release, here and at the others
                case Separated():
                    self._is_separated = True
                    self._note_change()
        self._run_own()

    def _from_follower(self, actions: list[FollowerAction]) -> None:
        assert self._tasks is not None
        for action in actions:
            match action:
                case ToLeader(message) if self._leader is not None:
                    self._later(self._to_leader, 0, message)
                case ToLeader(message):
                    self._post(0, message)
                case StartHoldTimer(hold):
                    self._end_hold_timer()
                    self._hold_timer = asyncio.get_running_loop().call_later(
                        self._config.hold_timeout_s, self._hold_timed_out, hold
                    )
                case Apply():
                    self._worker.apply(action)
                case RunBeforeApply():
                    self._instruct(action)
                case Leave() | Unpark() | PollFails():
                    self._end_hold_timer()
                    self._instruct(action)
        self._run_own()

    def _post(self, rank: int, message: FlowMessage) -> None:
        if self._epoch is not None:
            self._link.post(rank, Keyed(self._epoch, message))

    def _later(self, deliver: Callable[..., None], *args: object) -> None:
        self._own.append(functools.partial(deliver, *args))

    def _run_own(self) -> None:
        if self._draining:
            return
        self._draining = True
        try:
            while self._own:
                self._own.popleft()()
            if self._to_tell:
                to_tell, self._to_tell = self._to_tell, []
                self._worker.to_coordinator(*to_tell)
        finally:
            self._draining = False

    def _hold_timed_out(self, hold: int) -> None:
        self._from_follower(self.follower.hold_timed_out(hold))

    def _end_hold_timer(self) -> None:
        if self._hold_timer is not None:
            self._hold_timer.cancel()

    async def _time_grant(self, ticket: int, epoch: Epoch | None) -> None:
        await anyio.sleep(self._config.coordinator_timeout_s)  # the deadline
        assert self._leader is not None
        if epoch == self._epoch:
            self._from_leader(self._leader.grant_timed_out(ticket))
