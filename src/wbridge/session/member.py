"""Member: one worker's place in the job, from the handshake through epoch after epoch."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Protocol

import anyio
import anyio.abc
import msgspec

from wbridge.config import Config
from wbridge.control.agreement import adopt, explicit_settings
from wbridge.control.client import connect_coordinator
from wbridge.control.lease import LeasedConnection
from wbridge.control.messages import (
    Bye,
    EpochLive,
    EpochReady,
    EpochStart,
    FlowMessage,
    Join,
    Keyed,
    WorkerLost,
)
from wbridge.control.rendezvous import Rendezvous, look_up
from wbridge.errors import BarrierTimeout, EndpointClosed, PeerLost, WBridgeError
from wbridge.ids import Epoch, WorkerId
from wbridge.layout.source_map import SourceMap
from wbridge.plan.types import WorkerPlan


class Job(msgspec.Struct, frozen=True):
    """What a worker knows of the job before it connects."""

    worker: WorkerId
    rendezvous: Rendezvous
    config: Config
    origins: dict[str, str]
    secret: bytes
    host: str
    process_token: str


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

    async def start_epoch(self, start: EpochStart, plan: WorkerPlan) -> None:
        """Drop the old epoch and get ready for this one; returns when ready."""
        ...

    def epoch_live(self, epoch: Epoch) -> None: ...

    async def receive(self, message: FlowMessage) -> None:
        """Act on a message of the current epoch. Must not wait for other workers."""
        ...

    def worker_lost(self, worker: WorkerId, reason: str) -> None: ...

    def coordinator_lost(self, reason: str) -> None: ...

    async def close_epoch(self) -> None:
        """The adapter closes: stop everything that belongs to the epoch."""
        ...


PATIENCE_S = 10.0
"""The coordinator is the first to say that time is up, since it knows who is missing."""

HostCoordinator = Callable[..., Coroutine[object, object, None]]
"""Runs a coordinator; reports (rendezvous, secret) as its `task_status`."""


class Member:
    """The connection to the coordinator: joins, answers epochs, hands flow messages to the role."""

    def __init__(self, job: Job, role: Role, source_map: SourceMap, connect_timeout_s: float) -> None:
        self._job = job
        self._role = role
        self._source_map = msgspec.msgpack.encode(source_map)
        self._connect_timeout_s = connect_timeout_s
        self._lease: LeasedConnection | None = None
        self._starting: Epoch | None = None
        self._is_leaving = False
        self._addresses: Addresses | None = None
        self.epoch: Epoch | None = None
        self.connected: Future[None] = Future()

    def post(self, message: FlowMessage) -> None:
        """Send a message of the current epoch to the coordinator. Never waits.

        Raises:
            PeerLost: there is no coordinator, or no epoch, now.
        """
        if self._lease is None or self.epoch is None:
            raise PeerLost(f"{self._job.worker}: the coordinator is gone; waiting for it to come back")
        self._lease.post(Keyed(self.epoch, message))

    async def run(self, host_coordinator: HostCoordinator | None) -> None:
        """Be a member until cancelled. A failure before `connected` is put there and ends it."""
        try:
            async with anyio.create_task_group() as tasks:
                job = self._job
                if host_coordinator is not None:
                    rendezvous, secret = await tasks.start(host_coordinator)
                    job = msgspec.structs.replace(job, rendezvous=rendezvous, secret=secret)
                tasks.start_soon(self._watch_connect)
                while not self._is_leaving:
                    await self._attend(tasks, job)
        except* WBridgeError as group:
            error = first_error(group)
            if self.connected.done():
                self._role.coordinator_lost(str(error))
            else:
                self.connected.set_exception(error)
        finally:
            with anyio.CancelScope(shield=True):
                await self._role.close_epoch()
            if not self.connected.done():
                self.connected.set_exception(EndpointClosed(f"{self._job.worker}: closed while connecting"))

    async def _watch_connect(self) -> None:
        with anyio.move_on_after(self._connect_timeout_s + PATIENCE_S):
            await anyio.sleep_forever()
        if not self.connected.done():
            raise BarrierTimeout(
                f"{self._job.worker}: no epoch was live within {self._connect_timeout_s:g} s;"
                " `wbridge status` says whom the coordinator waits for",
                ["coordinator"],
            )

    async def _attend(self, tasks: anyio.abc.TaskGroup, job: Job) -> None:
        """One connection to a coordinator, until it is lost."""
        connection, welcome = await connect_coordinator(
            job.rendezvous,
            job.worker,
            job.config,
            explicit=explicit_settings(job.config, job.origins),
            host=job.host,
            process_token=job.process_token,
            secret=job.secret,
        )
        async with LeasedConnection(connection, welcome.heartbeat_s) as lease:
            tasks.start_soon(lease.run)
            if self._addresses is None:
                secret = look_up(job.rendezvous, job.secret).secret
                config = adopt(job.config, welcome.job)
                self._addresses = await self._role.open(config, secret, tasks, connection.local_host)
            addresses, patience_s = self._addresses, self._connect_timeout_s
            lease.post(Join(self._source_map, addresses.transport, addresses.lockstep, patience_s))
            self._lease = lease
            try:
                await self._read(lease)
            except PeerLost as exc:
                if not self.connected.done():
                    raise
                self._role.coordinator_lost(str(exc))
            finally:
                self._lease = self.epoch = None

    async def _read(self, lease: LeasedConnection) -> None:
        while True:
            message = await lease.receive()
            match message:
                case Keyed(epoch, flow) if epoch == self.epoch:
                    await self._role.receive(flow)
                case EpochStart():
                    self.epoch, self._starting = None, message.epoch
                    plan = msgspec.msgpack.decode(message.worker_plan, type=WorkerPlan)
                    await self._role.start_epoch(message, plan)
                    lease.post(EpochReady(message.epoch))
                case EpochLive(epoch) if epoch == self._starting:
                    self.epoch = epoch
                    self._role.epoch_live(epoch)
                    if not self.connected.done():
                        self.connected.set_result(None)
                case WorkerLost(worker, reason):
                    self._role.worker_lost(worker, reason)
                case Bye():
                    raise PeerLost(f"the coordinator at {lease.remote} has ended")
                case _:
                    pass  # of another epoch: nothing in it is ours any more

    def leave(self) -> None:
        """Say goodbye, so that nobody waits for a lease to run out; then connect no more."""
        self._is_leaving = True
        if self._lease is not None:
            try:
                self._lease.post(Bye())
                self._lease.finish()
            except (PeerLost, EndpointClosed):
                return  # it has gone first


def first_error(group: BaseExceptionGroup[WBridgeError]) -> WBridgeError:
    """The error that ended a task group; others are consequences."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, WBridgeError)
    return error
