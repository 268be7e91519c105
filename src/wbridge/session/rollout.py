"""Rollout: the receiving worker between its caller and the loop thread."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from threading import get_ident

import anyio
import anyio.abc
import msgspec

from wbridge.config import Config
from wbridge.control.messages import Committed, EpochStart, FlowMessage, TakeDigest
from wbridge.control.planning import leader_address
from wbridge.device.base import AnyStream, Device, Event
from wbridge.engine.apply import Destinations
from wbridge.engine.lockstep import Instruction, Lockstep, Written
from wbridge.engine.receive import ReceiveEngine
from wbridge.engine.wire import DataFrame
from wbridge.errors import EndpointClosed, PeerLost, ProtocolError, UpdateAborted, WBridgeError
from wbridge.flow.actions import Apply, Leave, PollFails, RunBeforeApply, Unpark
from wbridge.flow.messages import Alive, Arrived, Credit, Serve, Stopped, TicketAborted, Unwanted
from wbridge.ids import Epoch, WorkerId
from wbridge.observe.stats import UpdateClock, UpdateStats
from wbridge.plan.types import WorkerPlan
from wbridge.session.applying import Applying
from wbridge.session.contexts import open_receiver_context
from wbridge.session.endpoints import Target, described_by
from wbridge.session.gate import StepGate
from wbridge.session.late_writers import LateWriters
from wbridge.session.member import Addresses
from wbridge.session.outbox import Outbox
from wbridge.session.pacing import Pacing
from wbridge.session.pausing import Pausing
from wbridge.session.readiness import Readiness, attempt
from wbridge.session.script import Script, Wait
from wbridge.session.steps import Step, is_inside_step, misplaced_poll
from wbridge.session.updates import RolloutHooks, Serving, Update
from wbridge.session.verification import Respondent
from wbridge.session.worker import Worker, load_job


class Rollout:
    """Takes versions between steps. Public methods are scripts; the rest runs in the loop thread."""

    def __init__(
        self,
        target: Target,
        *,
        rendezvous: str | None,
        config: Config | Mapping[str, object] | None,
        hooks: RolloutHooks | None,
        secret: str | None,
        device: Device | None,
    ) -> None:
        self._target = target
        self._worker = Worker(load_job(described_by(target, Target), rendezvous, config, secret), device)
        self._pausing = Pausing(hooks)
        self._tasks: anyio.abc.TaskGroup | None = None
        self._lockstep: Lockstep | None = None
        self._destinations: Destinations | None = None
        self._engine: ReceiveEngine | None = None
        self._respondent: Respondent | None = None
        self._epoch: Epoch | None = None
        self._serve: Serve | None = None
        self._applies: Applying | None = None
        self._applying: Committed | None = None
        self._committed: Committed | None = None
        self._packed = b""
        self._ended: WBridgeError | None = None
        self._readiness: Readiness | None = None
        self._is_cancelled = self._is_polling = False
        self._received_nbytes = 0
        self._binding = anyio.Lock()
        self._outbox = Outbox(self._worker.post)
        self.to_coordinator = self._outbox.send
        self._late_writers = LateWriters(target.worker)
        self.gate: StepGate = self._pausing.gate
        self.pacing: Pacing = Pacing(self._worker.loop.clock)
        self.serving: Serving = Serving()

    # The caller's side ---------------------------------------------------------------------------------

    def connect(self, timeout_s: float | None) -> Script[None]:
        return self._worker.connect(self, self._target, timeout_s)

    def begin_poll(self) -> bool:
        """Count one poll; whether it has to be driven on. Reads local memory, nothing else."""
        lockstep = self._lockstep
        if lockstep is None:
            raise EndpointClosed(f"{self._target.worker}: connect() before the first poll")
        if self._is_polling or is_inside_step(self.gate):
            raise misplaced_poll(self._target.worker, is_second=self._is_polling)
        lockstep.follower.counter += 1
        return lockstep.follower.flag or self._worker.loop.is_forked

    def poll(self, wait_s: float | None, stream: AnyStream | None) -> Script[Update | None]:
        """Drive a counted poll to its end."""
        until_s = None if wait_s is None else self._worker.loop.clock() + wait_s
        self._is_cancelled = False
        while True:
            self._is_polling = True
            try:
                update = yield from self._poll_once(wait_s, stream)
            finally:
                self._is_polling = False
            if update is not None or until_s is None or self._is_cancelled:
                return update
            wait_s = until_s - self._worker.loop.clock()
            if wait_s <= 0:
                return None
            self.begin_poll()

    def _poll_once(self, wait_s: float | None, stream: AnyStream | None) -> Script[Update | None]:
        lockstep, readiness = self._lockstep, self._readiness
        assert lockstep is not None and readiness is not None
        clock = UpdateClock(slept=wait_s is not None and not lockstep.follower.flag)
        refusal: BaseException | None = None
        failure, self._applying = "", None
        self._pausing.begin_poll()
        place = (self._worker.stream_of_caller(stream), get_ident())
        instruction = yield from self._ask(readiness.begin, clock, *place, wait_s is not None, wait_s=wait_s)
        while True:
            match instruction:
                case RunBeforeApply(hold):
                    clock.asked()
                    refusal = yield from self._before_apply(stream)
                    clock.ready()
                    instruction = yield from self._ask(readiness.answer, hold, refusal)
                case Written(hold):
                    failure = yield from self._finish()
                    instruction = yield from self._ask(lockstep.applied, hold, failure)
                case Unpark():
                    yield from self._pausing.end(None, refusal)
                    return None
                case Leave():
                    return (yield from self._leave(instruction, clock.stats(instruction.lag), failure))
                case PollFails():
                    yield from self._pausing.end(None, self._failure(instruction))

    def _ask(
        self, tell: Callable[..., None], *arguments: object, wait_s: float | None = None
    ) -> Script[Instruction]:
        """Tell the lockstep something in the loop thread, and return the next instruction.

        A cancelled caller stays until the engine has answered; after `wait_s` it asks to be let go.
        """
        loop, lockstep = self._worker.loop, self._lockstep
        assert lockstep is not None
        answer: Future[Instruction] = Future()
        try:
            loop.call(functools.partial(attempt, answer, tell, *arguments))
        except EndpointClosed as exc:  # the adapter was closed meanwhile, by the hook for example
            if self._applying is not None:
                self._taint(f"{exc}, before the engine agreed on what is written")
            yield from self._pausing.end(None, exc)
            raise
        try:
            try:
                instruction: Instruction = yield Wait(answer, self._cancel_poll, timeout_s=wait_s)
            except TimeoutError:
                loop.call(lockstep.wait_over)
                instruction = yield Wait(answer, self._cancel_poll)
        except GeneratorExit:
            raise
        except BaseException as exc:  # whatever it is, the engine waits for this poll in vain, and is told
            instruction = PollFails(f"a poll failed: {exc!r}", tainted=self.gate.is_closed)
            with contextlib.suppress(EndpointClosed):
                loop.call(functools.partial(lockstep.close, f"{self._target.worker}: {instruction.reason}"))
        return instruction

    def _cancel_poll(self) -> None:
        assert self._lockstep is not None
        self._is_cancelled = True
        self._worker.loop.call(self._lockstep.cancel_poll)

    def _before_apply(self, stream: AnyStream | None) -> Script[BaseException | None]:
        """Get this worker ready to be written; what fails is the reason to refuse."""
        destinations, lockstep, readiness = self._destinations, self._lockstep, self._readiness
        assert destinations is not None and lockstep is not None and readiness is not None
        refusal = yield from self._pausing.before(destinations.check)
        if refusal is None:
            drain = self._pausing.drain(self._worker.loop, lockstep.wait_instruction, self._cancel_poll)
            if (yield from drain):
                readiness.after = self._worker.behind_steps(self._worker.stream_of_caller(stream))
        return refusal

    def _finish(self) -> Script[str]:
        """What the backend does when its parameters are written; returns why it failed."""
        assert self._destinations is not None
        load = self._target.load_assembled or self._target.load_weights
        return self._pausing.finish(self._destinations.finish, load, self._target.after_apply)

    def _leave(self, leave: Leave, stats: UpdateStats, failure: str) -> Script[Update | None]:
        if leave.outcome == "aborted":
            yield from self._pausing.end(None)
            return None
        if leave.outcome == "tainted":
            why = f" here: {failure}" if failure else ""
            self._taint(f"version {leave.version} (ticket {leave.ticket}) failed midway{why}")
            error = f"{self._target.worker}: {self.serving.tainted}; poll until a whole version lands"
            yield from self._pausing.end(None, UpdateAborted(error))  # raises it
        assert self._applying is not None
        self._committed = self._applying
        self.serving = Serving(leave.version, leave.ticket)
        metadata = msgspec.msgpack.decode(self._packed) if self._packed else {}
        update = Update(leave.version, self._committed.epoch, leave.ticket, metadata, stats)
        yield from self._pausing.end(update)
        return update

    def _failure(self, fails: PollFails) -> WBridgeError:
        if fails.tainted:
            self._taint(fails.reason)
        if self._ended is not None:
            return self._ended
        kind = ProtocolError if fails.protocol_error else PeerLost
        return kind(f"{self._target.worker}: {fails.reason}; close this adapter and connect again")

    def _taint(self, reason: str) -> None:
        self.serving = Serving(tainted=reason)

    def step(self, on_success: Callable[[], None] | None = None) -> Step:
        who = self._target.worker
        return Step(self.gate, lambda: self.serving.usable(who), on_success, self._worker.step_ends)

    def rebind(self) -> Script[None]:
        """See `wbridge.ReceiverAdapter.rebind`."""
        if self._destinations is None:
            raise EndpointClosed(f"{self._target.worker}: connect() before rebind()")
        if is_inside_step(self.gate):
            raise ProtocolError(f"{self._target.worker}: rebind() between steps, not inside one")
        yield Wait(self._worker.loop.submit(self._rebind).finished)

    async def _rebind(self) -> None:
        assert self._destinations is not None
        async with Step(self.gate, lambda: None), self._binding:  # no apply is under way
            self._taint("what they were may be lost: rebind() was called")
            with self._destinations.rebinding():
                if self._engine is not None:
                    await self._engine.rebind()

    def close(self) -> Script[None]:
        try:
            yield from self._worker.close()
        finally:
            self.gate.open()

    @property
    def epoch(self) -> Epoch | None:
        return self._epoch

    @property
    def counters(self) -> dict[str, int]:
        received = self._received_nbytes + (self._engine.received_nbytes if self._engine else 0)
        return {**self._worker.counters, "received_nbytes": received}

    # The loop thread: `Role` -----------------------------------------------------------------------------

    async def open(self, config: Config, secret: bytes, tasks: anyio.abc.TaskGroup, host: str) -> Addresses:
        self._tasks = tasks
        assert self._worker.source_map is not None
        target = self._target
        self._destinations = Destinations(target.parameters, target.buffers, self._worker.source_map)
        transport = await self._worker.open_transports(config, tasks, self._frame)
        lockstep = Lockstep(self._target.worker, config, secret=secret, worker=self)
        address = await lockstep.open(tasks, host)
        self._lockstep = lockstep
        has_rest = self._target.after_apply is not None or self._destinations.has_assembled
        self._applies = Applying(lockstep, tasks, has_rest=has_rest)
        self._readiness = Readiness(
            lockstep,
            self._pausing,
            tasks,
            check=self._destinations.check,
            behind_steps=self._worker.behind_steps,
            wait_readers=self._wait_readers,
        )
        return Addresses(transport, address)

    async def _wait_readers(self, after: Event) -> None:
        if self._engine is not None:
            await self._engine.wait_readers(after)

    async def start_epoch(self, start: EpochStart, plan: WorkerPlan, config: Config) -> None:
        lockstep, destinations = self._lockstep, self._destinations
        assert lockstep is not None and destinations is not None and self._tasks is not None
        self._outbox.close()
        await lockstep.enter(start.epoch, leader_address(start, self._target.worker.group), config)
        self._outbox.clear()
        await self._stop_engine()
        await self._late_writers.wait_gone(self._worker.transports)
        async with self._binding:
            context = await open_receiver_context(
                start,
                plan,
                config,
                transport=self._worker.transports,
                device=self._worker.open_epoch_device(),
                tensors=destinations.tensors,
            )
            self._engine = ReceiveEngine(context, to_leader=lockstep.from_ring, give_up=lockstep.give_up)
        self._epoch = start.epoch
        holdings = self._worker.holdings(plan, destinations.tensors)
        self._respondent = Respondent(holdings, self, self._worker.post)
        self._worker.run_epoch(self._tasks, self._engine.run)

    def epoch_live(self, epoch: Epoch) -> None:
        self._outbox.open()

    def receive(self, message: FlowMessage) -> None:
        assert self._lockstep is not None and self._tasks is not None
        if isinstance(message, TakeDigest) and self._respondent is not None:
            self._tasks.start_soon(self._respondent.answer, message)
        else:
            self._lockstep.from_coordinator(message)

    def worker_lost(self, worker: WorkerId, reason: str) -> None:
        """What a trainer was to bring is aborted by the coordinator; what it may still write is fenced."""
        if self._engine is not None:
            self._engine.lose(str(worker))

    def coordinator_lost(self, reason: str) -> None:
        self._outbox.clear()
        if self._lockstep is not None:
            self._lockstep.coordinator_lost()

    async def stop(self) -> None:
        await self._stop_engine()
        self._late_writers.warn()

    async def _stop_engine(self) -> None:
        engine, self._engine = self._engine, None
        await self._worker.stop_epoch()
        if engine is not None:
            self._late_writers.add(engine.unproven)
            self._received_nbytes += engine.received_nbytes

    def end(self, error: WBridgeError) -> None:
        self._ended = error
        if self._lockstep is not None:
            self._lockstep.close(str(error))

    @property
    def committed(self) -> Committed | None:
        return self._committed if self.serving.version is not None else None

    # The loop thread: what the lockstep asks -------------------------------------------------------------

    def serve(self, serve: Serve) -> None:
        assert self._engine is not None
        self._serve = serve
        self._engine.serve(serve.ticket, serve.engines)

    def abort(self, aborted: TicketAborted) -> None:
        assert self._engine is not None
        self._engine.abort(aborted.ticket, aborted.reason)

    def engine_broken(self, reason: str) -> None:
        if self._engine is not None:
            self._engine.abort_current(reason)

    def apply(self, apply: Apply) -> None:
        assert self._tasks is not None and self._epoch is not None and self._serve is not None
        self._applying = Committed(self._epoch, apply.ticket, apply.version)
        self._packed = self._serve.metadata
        engine, readiness, applying = self._engine, self._readiness, self._applies
        assert engine is not None and readiness is not None and applying is not None
        after = readiness.after
        assert after is not None, "an apply comes after its poll was ready"
        applying.begin(engine, apply, after)

    def _frame(self, peer: str, frame: DataFrame) -> None:
        if self._engine is None or frame.epoch != self._epoch:
            return
        match frame.message:
            case Arrived():
                self._engine.heard(peer)
                self._engine.arrived(peer, frame.message)
            case Stopped():
                self._engine.stopped(peer, frame.message)
            case Credit() | Alive() | Unwanted():
                self._engine.from_member(peer, frame.message)
