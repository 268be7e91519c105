"""A worker's connection to the coordinator is cut or goes silent at any byte: it comes back."""

from __future__ import annotations

import gc
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.abc
import pytest

from tests.unit.control.job import SECRET, Worker, rollout, running, trainer
from wbridge.config import Config
from wbridge.control import client, tcp
from wbridge.control.client import request_status
from wbridge.control.messages import EpochLive, EpochReady, EpochStart, Message
from wbridge.control.rendezvous import TcpRendezvous
from wbridge.control.tcp import split_address
from wbridge.errors import EndpointClosed, PeerLost
from wbridge.ids import WorkerId

pytestmark = pytest.mark.anyio


class Proxy:
    """Passes bytes on; its first connection ends, or goes silent, after `limit_nbytes` in both directions."""

    def __init__(self, target: str, limit_nbytes: int, *, silent: bool) -> None:
        self._target = split_address(target)
        self._left_nbytes = limit_nbytes
        self._silent = silent
        self._num_connections = 0
        self.has_cut = False

    async def serve(self, near: anyio.abc.SocketStream) -> None:
        self._num_connections += 1
        limited = self._num_connections == 1
        async with near, await anyio.connect_tcp(*self._target) as far, anyio.create_task_group() as tasks:
            tasks.start_soon(self._pass_on, near, far, limited, tasks.cancel_scope)
            tasks.start_soon(self._pass_on, far, near, limited, tasks.cancel_scope)

    async def _pass_on(
        self,
        source: anyio.abc.SocketStream,
        sink: anyio.abc.SocketStream,
        limited: bool,
        both: anyio.CancelScope,
    ) -> None:
        try:
            async for data in source:
                if limited:
                    data = data[: self._left_nbytes]
                    self._left_nbytes -= len(data)
                if data:
                    await sink.send(data)
                if limited and not self._left_nbytes:
                    self.has_cut = True
                    if not self._silent:
                        break
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass
        both.cancel()


@asynccontextmanager
async def proxied(target: str, limit_nbytes: int, *, silent: bool) -> AsyncIterator[tuple[Proxy, str]]:
    proxy = Proxy(target, limit_nbytes, silent=silent)
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, proxy.serve)
        yield proxy, f"127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}"
        tasks.cancel_scope.cancel()


class Attendance:
    """Two workers that come back after every loss. `meet` returns when both are in one live epoch."""

    def __init__(self, *workers: Worker) -> None:
        self.workers = workers
        self._changed = anyio.Event()

    async def attend(self, worker: Worker) -> None:
        while True:
            try:
                async with worker:
                    worker.join()
                    while True:
                        self._follow(worker, await worker.next())
            except* (PeerLost, EndpointClosed):
                worker.epoch = None

    def _follow(self, worker: Worker, message: Message) -> None:
        match message:
            case EpochStart(epoch):
                worker.start, worker.epoch = message, None
                worker.lease.post(EpochReady(epoch))
            case EpochLive(epoch):
                assert worker.start is not None
                assert epoch == worker.start.epoch
                worker.epoch = epoch
        self._changed.set()
        self._changed = anyio.Event()

    async def meet(self) -> None:
        while None in (epochs := {worker.epoch for worker in self.workers}) or len(epochs) > 1:
            await self._changed.wait()


async def survive(limit_nbytes: int, config: Config, *, silent: bool) -> bool:
    """Return whether the cut came before both workers were live."""
    async with (
        running(config) as coordinator,
        proxied(coordinator.address, limit_nbytes, silent=silent) as (proxy, address),
        anyio.create_task_group() as tasks,
    ):
        attendance = Attendance(Worker(trainer(), coordinator.address), Worker(rollout(), address))
        for worker in attendance.workers:
            tasks.start_soon(attendance.attend, worker)
        await attendance.meet()
        place = TcpRendezvous(*split_address(coordinator.address))
        has_cut = proxy.has_cut
        members: list[WorkerId] = []
        while members != [rollout(), trainer()]:  # the cut may have come just now
            reply = await request_status(place, Config(connect_timeout_s=5.0), secret=SECRET)
            members = [member.worker for member in reply.members]
        tasks.cancel_scope.cancel()
    return has_cut


def num_descriptors() -> int:
    gc.collect()  # what earlier tests have left
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("part", range(8))
async def test_a_cut_anywhere_is_survived(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_BACKOFF_S", 0.001)
    await survive(10**9, Config(), silent=False)
    descriptors = num_descriptors()
    results = [
        await survive(limit_nbytes, Config(), silent=False)
        for limit_nbytes in range(1 + part * 37, 2400, 296)
    ]
    assert results[0], "a cut in the handshake is noticed"
    assert num_descriptors() <= descriptors  # fewer when those of an earlier test go now


@pytest.mark.parametrize("limit_nbytes", [1, 100, 400, 800, 1500])
async def test_a_connection_that_goes_silent_is_noticed_and_replaced(
    limit_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "FIRST_BACKOFF_S", 0.001)
    monkeypatch.setattr(client, "HANDSHAKE_S", 0.1)
    monkeypatch.setattr(tcp, "HANDSHAKE_S", 0.1)
    descriptors = num_descriptors()
    assert await survive(limit_nbytes, Config(heartbeat_s=0.05), silent=True)
    assert num_descriptors() <= descriptors  # fewer when those of an earlier test go now
