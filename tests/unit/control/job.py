"""A coordinator in this process and workers that talk to it over loopback TCP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType

import anyio
import anyio.abc
import msgspec

from wbridge.config import Config
from wbridge.control.agreement import adopt, explicit_settings
from wbridge.control.client import connect_coordinator
from wbridge.control.coordinator import Coordinator
from wbridge.control.lease import LeasedConnection
from wbridge.control.messages import (
    Committed,
    EpochLive,
    EpochReady,
    EpochStart,
    FlowMessage,
    Join,
    Keyed,
    Message,
    Welcome,
)
from wbridge.control.planning import unpacked_slice
from wbridge.control.rendezvous import TcpRendezvous
from wbridge.control.tcp import split_address
from wbridge.ids import Epoch, WorkerId
from wbridge.layout.region import Region, Strided
from wbridge.layout.source_map import Mapped, ParameterSpec, SourceMap, TensorSpec
from wbridge.plan.tables import tabulate
from wbridge.plan.types import WorkerPlan

SECRET = b"of this job"
NUM_ROWS, NUM_COLUMNS = 8, 4


def trainer(rank: int = 0, size: int = 1, group: str = "train") -> WorkerId:
    return WorkerId("trainer", group, (size,), (rank,))


def rollout(engine: str = "e0", rank: int = 0, size: int = 1) -> WorkerId:
    return WorkerId("rollout", engine, (size,), (rank,))


def source_map(worker: WorkerId, dtype: str = "float32") -> SourceMap:
    """One weight whose rows are divided among the workers of a group."""
    num_rows = NUM_ROWS // worker.group_size
    region = Region(
        (num_rows, NUM_COLUMNS),
        source=Strided(worker.rank * num_rows * NUM_COLUMNS, (NUM_COLUMNS, 1)),
        target=Strided(0, (NUM_COLUMNS, 1)),
    )
    return SourceMap(
        checkpoint={"w": TensorSpec((NUM_ROWS, NUM_COLUMNS), dtype)},
        parameters={"w": ParameterSpec((num_rows, NUM_COLUMNS), (NUM_COLUMNS, 1), dtype)},
        mapped=(Mapped("w", "w", region),),
    )


class Worker:
    """One worker, driven message by message. Use it as an async context manager."""

    def __init__(
        self,
        worker: WorkerId,
        address: str,
        *,
        config: Config | None = None,
        origins: dict[str, str] | None = None,
        token: str = "",
        host: str = "host",
        committed: Committed | None = None,
    ) -> None:
        self.id = worker
        self.config = config or Config(connect_timeout_s=5.0)
        self.origins = origins or {}
        self.address = address
        self.token = token or f"process of {worker}"
        self.host = host
        self.committed = committed
        self.epoch: Epoch | None = None
        self.start: EpochStart | None = None
        self.welcome: Welcome
        self.lease: LeasedConnection
        self._tasks: anyio.abc.TaskGroup

    async def __aenter__(self) -> Worker:
        connection, self.welcome = await connect_coordinator(
            TcpRendezvous(*split_address(self.address)),
            self.id,
            self.config,
            explicit=explicit_settings(self.config, self.origins),
            host=self.host,
            adapter_token=self.token,
            secret=SECRET,
            committed=self.committed,
        )
        self.config = adopt(self.config, self.welcome.job)
        self.lease = LeasedConnection(connection, self.welcome.heartbeat_s)
        self._tasks = await anyio.create_task_group().__aenter__()
        await self._tasks.start(self.lease.run)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self.lease.abort("the test is over")
        return await self._tasks.__aexit__(kind, value, trace)

    def join(self, described: SourceMap | None = None, patience_s: float = 0.0) -> None:
        encoded = msgspec.msgpack.encode(tabulate(described or source_map(self.id)))
        address = f"address of {self.id}".encode()
        self.lease.post(Join(encoded, address, f"lockstep of {self.id}", patience_s))

    async def next(self) -> Message:
        return await self.lease.receive()

    async def be_ready(self) -> EpochStart:
        """Wait for the start of an epoch, skipping what is left of the old one, and get ready."""
        while not isinstance(message := await self.next(), EpochStart):
            pass
        self.start, self.epoch = message, None
        self.lease.post(EpochReady(message.epoch))
        return message

    async def go_live(self) -> WorkerPlan:
        start = await self.be_ready()
        assert await self.next() == EpochLive(start.epoch)
        self.epoch = start.epoch
        return unpacked_slice(start.plan, self.id)

    def post(self, message: FlowMessage) -> None:
        assert self.epoch is not None
        self.lease.post(Keyed(self.epoch, message))

    async def flow(self) -> FlowMessage:
        """The next message of the update protocol; anything else is an error."""
        message = await self.next()
        assert isinstance(message, Keyed), message
        assert message.epoch == self.epoch
        return message.message


@asynccontextmanager
async def running(
    config: Config | None = None, origins: dict[str, str] | None = None
) -> AsyncIterator[Coordinator]:
    coordinator = Coordinator(config or Config(), secret=SECRET, origins=origins)
    async with anyio.create_task_group() as tasks:
        await tasks.start(coordinator.serve)
        yield coordinator
        tasks.cancel_scope.cancel()


async def live(*workers: Worker) -> None:
    """Join all and wait until all are in a live epoch."""
    for worker in workers:
        worker.join()
    await together(*workers)


async def together(*workers: Worker) -> None:
    async with anyio.create_task_group() as tasks:
        for worker in workers:
            tasks.start_soon(worker.go_live)
