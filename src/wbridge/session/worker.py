"""Worker: what both ends share: settings, the loop thread, the membership, and how it all ends."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread

from wbridge import settings
from wbridge.config import Config
from wbridge.control.connection import split_address
from wbridge.control.coordinator import Coordinator
from wbridge.control.messages import FlowMessage
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
from wbridge.device.base import Device, Stream
from wbridge.device.select import open_device
from wbridge.discovery.discover import discover
from wbridge.engine.wire import DataFrame, decode
from wbridge.errors import EndpointClosed
from wbridge.ids import WorkerId
from wbridge.layout.source_map import SourceMap
from wbridge.session.endpoints import Source, Target
from wbridge.session.member import Job, Member, Role
from wbridge.session.portal import Call, LoopThread
from wbridge.session.script import Run, Script, Wait
from wbridge.transport.host import host_identity, process_token
from wbridge.transport.select import Transports, open_transports


def load_job(
    worker: WorkerId,
    rendezvous: str | None,
    config: Config | Mapping[str, object] | None,
    secret: str | None,
) -> Job:
    """Gather what is known before connecting, from arguments, environment and `WBRIDGE_CONFIG`.

    Raises:
        ConfigError: a setting or the rendezvous is wrong; names it.
    """
    arguments = settings.non_defaults(config) if isinstance(config, Config) else (config or {})
    loaded, origins = settings.load(arguments, os.environ)
    return Job(
        worker=worker,
        rendezvous=parse_rendezvous(rendezvous or "env://", os.environ),
        config=loaded,
        origins=origins,
        secret=secret.encode() if secret is not None else settings.load_secret(os.environ),
        host=host_identity(loaded.host),
        process_token=process_token(),
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
        self.loop = LoopThread(f"wbridge {job.worker}")
        self._given_device = device
        self._device_type = "cpu"
        self._caller_device: Device | None = device
        self._epoch_device: Device | None = None
        self._member: Member | None = None
        self._running: Call[None] | None = None
        self._transports: Transports | None = None
        self._epoch_task: Call[None] | None = None
        self._closed = False
        self.source_map: SourceMap | None = None
        """Known once `connect` has discovered it."""

    # The caller's side ---------------------------------------------------------------------------------

    def connect(self, role: Role, described: Source | Target, timeout_s: float | None) -> Script[None]:
        """Discover, join, and return when the first epoch is live."""
        if self._closed or self._member is not None:
            raise EndpointClosed(f"{self.job.worker}: connect() once, on an open adapter; make a new one")
        self._device_type = next((t.device.type for t in described.parameters.values()), "cpu")
        self.source_map = yield Run(discover_map, described, self.job.config)
        self.loop.start()
        timeout_s = timeout_s or self.job.config.connect_timeout_s
        member = self._member = Member(self.job, role, self.source_map, timeout_s)
        host = self._host_coordinator if self._hosts_coordinator else None
        running = self._running = self.loop.submit(lambda: member.run(host))
        yield Wait(member.connected, lambda: self.loop.cancel(running))

    def current_stream(self) -> Stream:
        """The calling thread's own stream."""
        if self._caller_device is None:
            self._caller_device = open_device(self._device_type)
        return self._caller_device.current_stream()

    @property
    def counters(self) -> dict[str, int]:
        return self._transports.counters if self._transports is not None else {}

    def close(self) -> Script[None]:
        """Say goodbye and end everything within `close_timeout_s`; what is left then is cut. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._running is not None:
            running = self._running
            if not running.finished.done():
                yield Wait(self.loop.submit(self._leave).finished)
                self.loop.cancel(running)
                yield Wait(settled(running.finished))
            yield Run(self.loop.stop)
        if self._given_device is None and self._caller_device is not None:
            self._caller_device.close()

    async def _leave(self) -> None:
        if self._member is not None:
            self._member.leave()

    # The loop thread -----------------------------------------------------------------------------------

    @property
    def transports(self) -> Transports:
        assert self._transports is not None
        return self._transports

    def post(self, message: FlowMessage) -> None:
        assert self._member is not None
        self._member.post(message)

    async def open_transports(
        self, config: Config, tasks: anyio.abc.TaskGroup, deliver: Callable[[str, DataFrame], None]
    ) -> bytes:
        """Open the transports for as long as `tasks` runs, and hand what arrives to `deliver`."""

        async def serve(*, task_status: anyio.abc.TaskStatus[None]) -> None:
            async with open_transports(
                config, self.job.process_token, name=str(self.job.worker)
            ) as transports:
                self._transports = transports
                task_status.started()
                async for message in transports.inbox:
                    deliver(message.peer, decode(message.payload, message.peer))

        await tasks.start(serve)
        return self.transports.address

    def open_epoch_device(self) -> Device:
        """The device whose streams and buffers belong to the epoch that starts."""
        self._epoch_device = self._given_device or open_device(self._device_type)
        return self._epoch_device

    async def run_epoch(self, tasks: anyio.abc.TaskGroup, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work` in `tasks` until `stop_epoch`."""
        call: Call[None] = Call()
        self._epoch_task = call
        tasks.start_soon(call.run, work)

    async def stop_epoch(self) -> None:
        """Cancel the epoch's work, wait until it has ended, and free its device. Idempotent."""
        call, self._epoch_task = self._epoch_task, None
        if call is not None:
            call.request_cancel()
            await call.ended.wait()
        device, self._epoch_device = self._epoch_device, None
        if device is not None and device is not self._given_device:
            await anyio.to_thread.run_sync(device.close)

    @property
    def _hosts_coordinator(self) -> bool:
        worker = self.job.worker
        return worker.role == "trainer" and worker.is_leader and self.job.config.coordinator == "embedded"

    async def _host_coordinator(self, *, task_status: anyio.abc.TaskStatus[tuple[Rendezvous, bytes]]) -> None:
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
                task_status.started((TcpRendezvous(*split_address(address)), secret))
                await anyio.sleep_forever()
            finally:
                withdraw(job.rendezvous, meeting)


def settled(future: Future[Any]) -> Future[None]:
    """A future that is done when `future` is, and never fails."""
    done: Future[None] = Future()
    future.add_done_callback(lambda _: done.set_result(None))
    return done
