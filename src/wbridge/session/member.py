"""Member: one worker's place in the job, from the handshake through epoch after epoch."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Protocol, TypeVar

import anyio
import anyio.abc
import anyio.to_thread
import msgspec

from wbridge.config import JOB_WIDE, Config
from wbridge.control.agreement import Explicit, adopt, explicit_settings
from wbridge.control.client import MAX_BACKOFF_S, connect_coordinator
from wbridge.control.connection import LINGER_S, rebuild_error
from wbridge.control.coordinator import Coordinator
from wbridge.control.lease import LeasedConnection
from wbridge.control.local import Lease
from wbridge.control.messages import (
    Bye,
    Committed,
    EpochLive,
    EpochReady,
    EpochStart,
    FlowMessage,
    Hello,
    Join,
    Keyed,
    Message,
    Reconfigure,
    Reconfigured,
    Value,
    Welcome,
    WorkerLost,
)
from wbridge.control.planning import unpacked_slice
from wbridge.control.rendezvous import Rendezvous, look_up
from wbridge.errors import (
    BarrierTimeout,
    ConfigError,
    EndpointClosed,
    InternalError,
    PeerLost,
    WBridgeError,
)
from wbridge.ids import Epoch, WorkerId
from wbridge.layout.source_map import SourceMap
from wbridge.plan.tables import tabulate
from wbridge.plan.types import WorkerPlan

_log = logging.getLogger(__name__)

E = TypeVar("E", bound=BaseException)


class Job(msgspec.Struct, frozen=True):
    """What a worker knows of the job before it connects."""

    worker: WorkerId
    rendezvous: Rendezvous
    config: Config
    origins: dict[str, str]
    secret: bytes
    host: str
    adapter_token: str


class Addresses(msgspec.Struct, frozen=True):
    """Where the other workers reach this one."""

    transport: bytes
    lockstep: str = ""


class Role(Protocol):
    """What a trainer and a rollout do differently. All methods run in the loop thread."""

    async def open(self, config: Config, secret: bytes, tasks: anyio.abc.TaskGroup, host: str) -> Addresses:
        """Open what lasts for the life of the adapter, in `tasks`.

        `config` has the job's settings, `host` is this machine's address on the way to the coordinator.
        """
        ...

    @property
    def committed(self) -> Committed | None:
        """What the live weights are, for a coordinator that comes back."""
        ...

    async def start_epoch(self, start: EpochStart, plan: WorkerPlan, config: Config) -> None:
        """Drop the old epoch and get ready for this one, with the job's settings from now on; returns when
        ready. Cancelled: another start or
        the end follows.

        Raises:
            PeerLost: a member is gone; another start follows.
        """
        ...

    def epoch_live(self, epoch: Epoch) -> None: ...

    def receive(self, message: FlowMessage) -> None:
        """Act on a message of the current epoch."""
        ...

    def worker_lost(self, worker: WorkerId, reason: str) -> None: ...

    def coordinator_lost(self, reason: str) -> None: ...

    async def stop(self) -> None:
        """The membership is over: end what still runs, and free it."""
        ...

    def end(self, error: WBridgeError) -> None:
        """After `stop`, whatever came of that: calls that wait now, and later ones, raise `error`."""
        ...


PATIENCE_S = 10.0
"""The coordinator is the first to say that time is up, since it knows who is missing."""

_FOR_LIFE = tuple(name for name in JOB_WIDE if name not in ("num_engines", "delivery", "mode"))
"""Settings that an adapter keeps; the others concern the coordinator alone, or may change with the epoch."""

HostCoordinator = Callable[..., Coroutine[object, object, None]]
"""Runs a coordinator; reports (coordinator, rendezvous, secret) as its `task_status`."""


class Member:
    """The connection to the coordinator: joins, answers epochs, hands flow messages to the role."""

    def __init__(self, job: Job, role: Role, source_map: SourceMap, connect_timeout_s: float) -> None:
        self._job = job
        self._role = role
        self._table = msgspec.msgpack.encode(tabulate(source_map))
        self._connect_timeout_s = connect_timeout_s
        self._lease: Lease | None = None
        self._hosted: Coordinator | None = None
        self._detached = anyio.Event()
        self._is_leaving = False
        self._config: Config | None = None
        self._addresses: Addresses | None = None
        self._starting: Epoch | None = None
        self._start_scope: anyio.CancelScope | None = None
        self._start_lock = anyio.Lock()
        self._left: set[int] = set()  # incarnations that are never accepted again
        self._num_asked = 0
        self._answered: anyio.Event | None = None  # while a `reconfigure` is under way
        self._refusal: WBridgeError | None = None
        self._unpinned: set[str] = set()
        self._num_calls: int | None = None
        self.epoch: Epoch | None = None
        self.connected: Future[None] = Future()
        self.failure: InternalError | None = None
        """What went wrong while it ended."""

    def post(self, *messages: FlowMessage) -> None:
        """Send messages of the current epoch to the coordinator. Never waits.

        Raises:
            PeerLost: there is no coordinator, or no epoch, now.
        """
        if self._lease is None or self.epoch is None:
            raise PeerLost(f"{self._job.worker}: the coordinator is gone; waiting for it to come back")
        self._lease.post(*[Keyed(self.epoch, message) for message in messages])

    def number_call(self) -> int:
        """Number a send that begins in a live epoch."""
        assert self._num_calls is not None, "a send begins before the first epoch is live"
        self._num_calls += 1
        return self._num_calls

    async def reconfigure(self, values: dict[str, Value], patience_s: float) -> None:
        """Ask for other job-wide settings, as all trainer ranks must; returns when an epoch has them.

        Cancelled: takes the request back; if all have asked already, the job changes all the same.
        """
        if self._lease is None or self._answered is not None:
            why = "the coordinator is gone" if self._lease is None else "another reconfigure() is under way"
            raise PeerLost(f"{self._job.worker}: {why}; try again later")
        answered = self._answered = anyio.Event()
        self._refusal = None
        self._num_asked += 1
        self._unpinned |= values.keys()  # what becomes of it may not reach us
        self._lease.post(Reconfigure(self._num_asked, values, patience_s))
        try:
            await answered.wait()
        except anyio.get_cancelled_exc_class():
            self._take_back(answered)
            raise
        finally:
            self._answered = None
        if self._refusal is not None:
            raise self._refusal

    def _take_back(self, answered: anyio.Event) -> None:
        if self._lease is not None and not answered.is_set():
            self._lease.post(Reconfigure(self._num_asked, {}))

    def _answer(self, refusal: WBridgeError | None) -> None:
        if self._answered is not None:
            self._refusal = refusal
            self._answered.set()

    async def run(self, host_coordinator: HostCoordinator | None) -> None:
        """Be a member until cancelled. Whatever ends it is what the role's calls, or `connected`, raise."""
        reason: WBridgeError = EndpointClosed(f"{self._job.worker}: the adapter was closed")
        try:
            async with anyio.create_task_group() as tasks:
                job = self._job
                if host_coordinator is not None:
                    self._hosted, rendezvous, secret = await tasks.start(host_coordinator)
                    job = msgspec.structs.replace(job, rendezvous=rendezvous, secret=secret)
                tasks.start_soon(self._watch_connect)
                while not self._is_leaving:
                    await self._attend(tasks, job)
        except* WBridgeError as group:
            reason = first_error(group)
        except* Exception as group:  # a bug: the callers get it, since nobody waits for this task
            reason = InternalError(f"{self._job.worker}: {first_error(group)!r}; please report it")
            reason.__cause__ = group
        finally:
            self._end(await self._stop(reason))

    async def _stop(self, reason: WBridgeError) -> WBridgeError:
        """Stop the role; return why it has ended. Not cancelled."""
        try:
            with anyio.CancelScope(shield=True):
                await self._role.stop()
        except Exception as exc:  # nobody waits for this task either: the callers and the log get it
            text = f"{self._job.worker}: stopping failed: {exc!r} (after: {reason}); please report it"
            self.failure = InternalError(text)
            self.failure.__cause__ = exc
            _log.error("stopping failed", extra={"worker": str(self._job.worker)}, exc_info=exc)
        return self.failure or reason

    def _end(self, reason: WBridgeError) -> None:
        self._role.end(reason)
        if not self.connected.done():
            self.connected.set_exception(reason)

    async def leave(self) -> None:
        """Say goodbye, so that nobody waits for a lease to run out. Waits a moment for it to be read."""
        self._is_leaving = True
        if self._lease is not None:
            self._lease.post(Bye())
            self._lease.finish()
            with anyio.move_on_after(LINGER_S):
                await self._detached.wait()

    async def _watch_connect(self) -> None:
        await anyio.sleep(self._connect_timeout_s + PATIENCE_S)  # the deadline
        if not self.connected.done():
            raise BarrierTimeout(
                f"{self._job.worker}: no epoch was live within {self._connect_timeout_s:g} s;"
                " `wbridge status` says whom the coordinator waits for",
                ["coordinator"],
            )

    # One coordinator after another -----------------------------------------------------------------------

    async def _attend(self, tasks: anyio.abc.TaskGroup, job: Job) -> None:
        """One connection to a coordinator, until it is lost."""
        found, welcome = await self._find_coordinator(job)
        self._detached = anyio.Event()
        async with found as lease:
            tasks.start_soon(lease.run)
            addresses = await self._open(tasks, job, welcome, lease.local_host)
            patience_s = self._connect_timeout_s
            lease.post(Join(self._table, addresses.transport, addresses.lockstep, patience_s))
            self._lease = lease
            lost = ""
            try:
                async with anyio.create_task_group() as starts:
                    try:
                        await lease.deliver(functools.partial(self._act, lease, starts))
                    except PeerLost as exc:
                        if not self.connected.done():
                            raise
                        lost = str(exc)
                    except EndpointClosed:
                        if not self._is_leaving:
                            raise
                    starts.cancel_scope.cancel()
            finally:
                self._lease = self.epoch = None
                self._answer(
                    PeerLost(f"{self._job.worker}: the coordinator is gone, with the job's settings")
                )
                self._detached.set()
            if not self._is_leaving:
                self._role.coordinator_lost(lost)

    async def _find_coordinator(self, job: Job) -> tuple[Lease, Welcome]:
        """Once connected, wait for as long as it takes: the weights stay as they are meanwhile."""
        if self._hosted is not None:
            hello = Hello(job.worker, job.host, job.adapter_token, self._explicit(), self._role.committed)
            return await self._hosted.admit_local(hello)
        while True:
            try:
                connection, welcome = await connect_coordinator(
                    job.rendezvous,
                    job.worker,
                    msgspec.structs.replace(job.config, connect_timeout_s=self._connect_timeout_s),
                    explicit=self._explicit(),
                    host=job.host,
                    adapter_token=job.adapter_token,
                    secret=job.secret,
                    committed=self._role.committed,
                )
            except BarrierTimeout:
                if not self.connected.done():
                    raise
                continue
            if welcome.incarnation not in self._left:
                return LeasedConnection(connection, welcome.heartbeat_s), welcome
            await connection.aclose()
            await anyio.sleep(MAX_BACKOFF_S)  # the back-off, at its cap

    def _explicit(self) -> Explicit:
        """What this worker insists on: not on what it has asked to change."""
        explicit = explicit_settings(self._job.config, self._job.origins)
        return {name: value for name, value in explicit.items() if name not in self._unpinned}

    async def _open(
        self, tasks: anyio.abc.TaskGroup, job: Job, welcome: Welcome, local_host: str
    ) -> Addresses:
        """Open what lasts for all coordinators, which must agree with the first one's settings."""
        config = adopt(job.config, welcome.job)
        if self._addresses is None:
            secret = look_up(job.rendezvous, job.secret).secret
            self._config = config
            self._addresses = await self._role.open(config, secret, tasks, local_host)
        differs = [n for n in _FOR_LIFE if getattr(config, n) != getattr(self._config, n)]
        if differs:
            raise ConfigError(
                f"{job.worker}: the coordinator came back with another {', '.join(differs)};"
                " close this adapter and connect again"
            )
        return self._addresses

    def _act(self, lease: Lease, starts: anyio.abc.TaskGroup, message: Message) -> None:
        match message:
            case Keyed(epoch, flow) if epoch == self.epoch:
                self._role.receive(flow)
            case EpochStart():
                self._begin(message, lease, starts)
            case EpochLive(epoch, num_calls) if epoch == self._starting:
                self.epoch = epoch
                if self._num_calls is None:
                    self._num_calls = num_calls
                self._role.epoch_live(epoch)
                if not self.connected.done():
                    self.connected.set_result(None)
            case Reconfigured(call) if call == self._num_asked:
                self._answer(rebuild_error(message) if message.error else None)
            case WorkerLost(worker, reason):
                self._role.worker_lost(worker, reason)
            case Bye():
                raise PeerLost(f"the coordinator at {lease.remote} has ended")
            case _:
                pass  # of another epoch: nothing in it is ours any more

    def _begin(self, start: EpochStart, lease: Lease, starts: anyio.abc.TaskGroup) -> None:
        """Start an epoch in a task of its own: it may wait for a worker that the coordinator finds lost."""
        old = self._starting
        if old is not None and old.incarnation != start.epoch.incarnation:
            self._left.add(old.incarnation)
        self.epoch, self._starting = None, start.epoch
        assert self._config is not None, "an epoch starts before the welcome"
        self._config = adopt(self._config, start.job)
        if self._start_scope is not None:
            self._start_scope.cancel()
        self._start_scope = anyio.CancelScope()
        starts.start_soon(self._start, start, self._config, lease, self._start_scope)

    async def _start(self, start: EpochStart, config: Config, lease: Lease, scope: anyio.CancelScope) -> None:
        with scope:
            async with self._start_lock:
                plan = await anyio.to_thread.run_sync(unpacked_slice, start.plan, self._job.worker)
                try:
                    await self._role.start_epoch(start, plan, config)
                except PeerLost as exc:
                    _log.warning(
                        "an epoch does not start", extra={"epoch": str(start.epoch), "why": str(exc)}
                    )
                else:
                    lease.post(EpochReady(start.epoch, self._num_calls))


def first_error(group: BaseExceptionGroup[E]) -> E:
    """The error that ended a task group; others are consequences."""
    error = group.exceptions[0]
    return first_error(error) if isinstance(error, BaseExceptionGroup) else error
