"""Worker: what both ends share: settings, the loop thread, the membership, and how it all ends."""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread

from wbridge import settings
from wbridge.config import Config
from wbridge.control.coordinator import Coordinator
from wbridge.control.messages import FlowMessage, Value
from wbridge.control.rendezvous import (
    Meeting,
    Rendezvous,
    TcpRendezvous,
    bind_address,
    choose_secret,
    parse_rendezvous,
    publish,
    withdraw,
)
from wbridge.control.tcp import split_address
from wbridge.device.base import Access, AnyStream, Device, Event, NetworkedGpu, Stream
from wbridge.device.select import find_access, find_network, home_of, open_device
from wbridge.discovery.discover import discover
from wbridge.engine.wire import DataFrame, decode
from wbridge.errors import ConfigError, EndpointClosed, InternalError
from wbridge.ids import WorkerId
from wbridge.layout.source_map import SourceMap
from wbridge.plan.types import WorkerPlan
from wbridge.session.endpoints import Source, Target
from wbridge.session.member import HostCoordinator, Job, Member, Role
from wbridge.session.portal import Call, Loop, open_loop
from wbridge.session.script import Run, Script, Wait, first_done
from wbridge.session.verification import Holdings
from wbridge.transport.host import host_identity, process_token
from wbridge.transport.select import Transports, open_transports

_log = logging.getLogger(__name__)


def load_job(
    worker: WorkerId,
    rendezvous: str | None,
    config: Config | Mapping[str, object] | None,
    secret: str | None,
) -> Job:
    """Gather what is known before connecting, from arguments and environment.

    Raises:
        ConfigError: a setting or the rendezvous is wrong; names it.
    """
    if not isinstance(config, Config | Mapping | None):
        raise ConfigError(f"{worker}: config is {config!r}; give a wbridge.Config, or a mapping of settings")
    arguments = settings.non_defaults(config) if isinstance(config, Config) else (config or {})
    loaded, origins = settings.load(arguments, os.environ)
    return Job(
        worker=worker,
        rendezvous=parse_rendezvous(rendezvous or "env://", os.environ),
        config=loaded,
        origins=origins,
        secret=secret.encode() if secret is not None else settings.load_secret(os.environ),
        host=host_identity(loaded.host),
        adapter_token=f"{process_token()}/{secrets.token_hex(8)}",
    )


def discover_map(described: Source | Target, config: Config) -> SourceMap:
    """Return the declared map, or watch the loader, in the caller's thread: loaders may be tied to it."""
    if described.source_map is not None:
        return described.source_map
    assert described.load_weights is not None  # the description was checked when it was built
    protected = described if isinstance(described, Target) else None
    return discover(
        checkpoint=described.checkpoint,
        parameters=described.parameters,
        load_weights=described.load_weights,
        config=config,
        buffers=protected.buffers if protected else None,
        atomic=protected.atomic if protected else (),
        cache_key=dict(described.cache_key) or None,
    )


class Worker:
    """One adapter's life: connect once, close once; and what both roles use in between."""

    def __init__(self, job: Job, device: Device | None) -> None:
        self.job = job
        self.loop: Loop = open_loop(f"wbridge {job.worker}")
        self._given_device = device
        self._device_name = "cpu"
        self._access = Access()
        self._gpu: NetworkedGpu | None = None
        self._caller_device: Device | None = device
        self._readers: Stream | None = None
        self._opening = threading.Lock()
        self._epoch_device: Device | None = None
        self._holdings: Holdings | None = None
        self._member: Member | None = None
        self._running: Call[None] | None = None
        self._has_run: anyio.Event
        self._transports: Transports | None = None
        self._epoch: tuple[anyio.CancelScope, anyio.Event] | None = None  # to end it, and when it has
        self._stopping = anyio.Lock()
        self._closed = False
        self.source_map: SourceMap | None = None
        """Known once `connect` has discovered it."""

    # The caller's side ---------------------------------------------------------------------------------

    def connect(self, role: Role, described: Source | Target, timeout_s: float | None) -> Script[None]:
        """Discover, join, and return when the first epoch is live."""
        if self._closed or self._member is not None:
            raise EndpointClosed(f"{self.job.worker}: connect() once, on an open adapter; make a new one")
        devices = [str(t.device) for t in described.parameters.values()]
        self._device_name = home_of(devices)
        self._access = find_access(devices)
        self._gpu = find_network(devices)
        self.source_map = yield Run(discover_map, described, self.job.config)
        self.loop.start()
        timeout_s = timeout_s or self.job.config.connect_timeout_s
        member = self._member = Member(self.job, role, self.source_map, timeout_s)
        host = self._host_coordinator if self._hosts_coordinator else None
        running = self._running = self.loop.submit(lambda: self._run(member, host))
        yield Wait(first_done(member.connected, running.finished), lambda: self.loop.cancel(running))
        (member.connected if member.connected.done() else running.finished).result()

    def stream_of_caller(self, given: AnyStream | None = None) -> Stream:
        """The stream that the application has given, else the calling thread's current one.

        Raises:
            ConfigError: a stream of another library was given that orders nothing on this worker's device.
        """
        if self._caller_device is None:
            self._caller_device = open_device(self._device_name, copy_threads=self.job.config.copy_threads)
        if given is None:
            return self._caller_device.current_stream()
        return given if isinstance(given, Stream) else self._caller_device.wrap_stream(given)

    def step_ends(self) -> None:
        """What the calling thread has submitted so far may read the weights; see `behind_steps`."""
        stream = self.stream_of_caller()
        if stream.is_capturing:
            return
        read = stream.record()
        if not read.is_done():
            self._open_readers().wait_event(read)

    def behind_steps(self, stream: Stream) -> Event:
        """Mark the point behind what was submitted to `stream`, and to those in which steps have ended."""
        event = stream.record()
        if self._readers is None:
            return event
        self._readers.wait_event(event)
        return self._readers.record()

    def _open_readers(self) -> Stream:
        assert self._caller_device is not None
        with self._opening:
            if self._readers is None:
                self._readers = self._caller_device.open_stream("readers")
        return self._readers

    @property
    def counters(self) -> dict[str, int]:
        return self._transports.counters if self._transports is not None else {}

    def close(self) -> Script[None]:
        """Say goodbye and end everything within `close_timeout_s`; what is left then is cut. Idempotent.

        A cancelled caller stays for that long too: an adapter left open would keep its job waiting.
        """
        if self._closed:
            return
        self._closed = True
        has_ended = not self.loop.is_forked
        if self._running is not None and has_ended:
            has_ended = False
            try:
                has_ended = yield Wait(self.loop.submit(self._end).finished, _nothing)
            finally:
                self.loop.stop(wait=has_ended)
            if not has_ended:
                _log.warning("closing took too long, a thread stays", extra={"adapter": self.loop.name})
        if self._readers is not None and has_ended:
            self._readers.close()
        if has_ended and self._given_device is None and self._caller_device is not None:
            self._caller_device.close()  # else a thread, or the parent of this fork, uses it
        if self._member is not None and self._member.failure is not None:
            raise self._member.failure

    async def _run(self, member: Member, host: HostCoordinator | None) -> None:
        self._has_run = anyio.Event()
        try:
            await member.run(host)
        finally:
            self._has_run.set()

    async def _end(self) -> bool:
        """Whether everything has ended in time."""
        running = self._running
        assert self._member is not None and running is not None
        with anyio.move_on_after(self.job.config.close_timeout_s):
            try:
                await self._member.leave()
            finally:
                running.request_cancel()
            await self._has_run.wait()
            return True
        return False

    # The loop thread -----------------------------------------------------------------------------------

    @property
    def transports(self) -> Transports:
        assert self._transports is not None
        return self._transports

    def post(self, *messages: FlowMessage) -> None:
        assert self._member is not None
        self._member.post(*messages)

    def number_call(self) -> int:
        assert self._member is not None
        return self._member.number_call()

    async def reconfigure(self, values: dict[str, Value], patience_s: float) -> None:
        assert self._member is not None
        await self._member.reconfigure(values, patience_s)

    async def open_transports(
        self, config: Config, tasks: anyio.abc.TaskGroup, deliver: Callable[[str, DataFrame], None]
    ) -> bytes:
        """Open the transports for as long as `tasks` runs, and hand what arrives to `deliver`."""

        async def serve(*, task_status: anyio.abc.TaskStatus[None]) -> None:
            async with open_transports(
                config, process_token(), name=str(self.job.worker), access=self._access, gpu=self._gpu
            ) as transports:
                self._transports = transports
                task_status.started()
                try:
                    await transports.inbox.attend(
                        lambda message: deliver(message.peer, decode(message.payload, message.peer))
                    )
                finally:
                    await self._stop_work()  # which takes back what peers may write, through the transports

        await tasks.start(serve)
        return self.transports.address

    def open_epoch_device(self) -> Device:
        """The device whose streams and buffers belong to the epoch that starts."""
        self._epoch_device = self._given_device or open_device(
            self._device_name, copy_threads=self.job.config.copy_threads
        )
        return self._epoch_device

    def holdings(self, plan: WorkerPlan, tensors: Mapping[str, Any]) -> Holdings:
        """What this worker holds in the epoch whose device is open. `Any`: torch stays out of this layer."""
        assert self.source_map is not None and self._epoch_device is not None
        self._holdings = Holdings(plan, self.source_map, self._epoch_device, tensors)
        return self._holdings

    def run_epoch(self, tasks: anyio.abc.TaskGroup, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work`, which owns what it uses, in `tasks` until `stop_epoch`. Its end is the membership's."""
        scope, over = self._epoch = anyio.CancelScope(), anyio.Event()

        async def run() -> None:
            try:
                with scope:
                    await work()
                    raise InternalError(
                        f"{self.job.worker}: its transfers ended by themselves; please report it"
                    )
            finally:
                over.set()

        tasks.start_soon(run)

    async def stop_epoch(self) -> None:
        """Cancel the epoch's work, wait until it has ended, and free its device. Not cancelled."""
        with anyio.CancelScope(shield=True):
            await self._stop_work()
            async with self._stopping:
                holdings, self._holdings = self._holdings, None
                if holdings is not None:
                    holdings.end()
                device, self._epoch_device = self._epoch_device, None
                if device is not None and device is not self._given_device:
                    await anyio.to_thread.run_sync(device.close)

    async def _stop_work(self) -> None:
        with anyio.CancelScope(shield=True):
            async with self._stopping:
                epoch, self._epoch = self._epoch, None
                if epoch is not None:
                    scope, over = epoch
                    scope.cancel()
                    await over.wait()

    @property
    def _hosts_coordinator(self) -> bool:
        worker = self.job.worker
        return worker.role == "trainer" and worker.is_leader and self.job.config.coordinator == "embedded"

    async def _host_coordinator(
        self, *, task_status: anyio.abc.TaskStatus[tuple[Coordinator, Rendezvous, bytes]]
    ) -> None:
        """Run the job's coordinator in this worker's loop, and make its address known."""
        job = self.job
        host, port = bind_address(job.rendezvous)
        secret = choose_secret(job.rendezvous, job.secret)
        coordinator = Coordinator(job.config, secret=secret, origins=job.origins, host=host, port=port)
        async with anyio.create_task_group() as tasks:
            address = await tasks.start(coordinator.serve)
            meeting = Meeting(address, secret)
            publish(job.rendezvous, meeting)
            try:
                task_status.started((coordinator, TcpRendezvous(*split_address(address)), secret))
                await anyio.sleep_forever()
            finally:
                withdraw(job.rendezvous, meeting)


def _nothing() -> None:
    """What a wait does that no cancellation can shorten."""
