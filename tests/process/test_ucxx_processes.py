"""The ucxx transport between two processes: the same promises, and what the death of one leaves behind."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import NamedTuple

import anyio
import pytest

from tests.faults.roles import FORKS
from tests.models.installed import needs
from tests.process import ucxx_peer
from wbridge.device.cpu import CpuDevice
from wbridge.errors import EndpointClosed, PeerLost
from wbridge.native.ucx import why_missing
from wbridge.transport.base import Endpoint, RemoteSlot
from wbridge.transport.ucxx import UcxxTransport

pytestmark = [pytest.mark.anyio, pytest.mark.process, needs("ucxx")]

LARGE = 64 * 2**20
DEVICE = CpuDevice()

# Over TCP the receiver has to do something for each byte; through the host's memory it has not.
WAYS = [("native", "all"), ("native", "tcp"), ("python", "all")]


@pytest.fixture(params=WAYS, ids="-".join)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    way, transports = request.param
    assert isinstance(way, str)
    if way == "native" and (why := why_missing()) is not None:
        pytest.skip(why)
    monkeypatch.setenv("UCX_TLS", transports)
    return way


def needs_the_receiver(way: str) -> bool:
    """Whether a put waits while the receiving process stands still."""
    return way == "python" or os.environ["UCX_TLS"] == "tcp"


class Child(NamedTuple):
    process: ForkServerProcess
    go_on: Connection
    transport: UcxxTransport
    endpoint: Endpoint
    address: bytes

    async def ask(self, command: bytes) -> bytes:
        await self.endpoint.send(command)
        return await self.answer()

    async def answer(self) -> bytes:
        message = await self.transport.inbox.receive()
        assert message.peer == "child"
        return message.payload

    async def expose(self, nbytes: int) -> RemoteSlot:
        return RemoteSlot(await self.ask(b"expose %d" % nbytes), nbytes)

    def exposed_here(self, nbytes: int) -> tuple[memoryview, RemoteSlot]:
        buffer = DEVICE.allocate(nbytes, "pinned")
        self.transport.register(buffer)
        return buffer.view, self.transport.expose(buffer.view, "child")

    async def ask_to_put(self, remote: RemoteSlot) -> None:
        await self.endpoint.send(b"put " + remote.token.hex().encode() + b"%16d" % remote.nbytes)

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    async def wait(self) -> int | None:
        await anyio.wait_readable(self.process.sentinel)
        self.process.join()
        return self.process.exitcode


@asynccontextmanager
async def open_child(way: str, close_timeout_s: float = 10.0) -> AsyncIterator[Child]:
    with anyio.fail_after(50):
        async with UcxxTransport(
            "parent", close_timeout_s=close_timeout_s, native=way == "native"
        ) as transport:
            theirs, go_on = FORKS.Pipe(duplex=False)
            arguments = (transport.address, way, os.environ["UCX_TLS"], theirs)
            process = FORKS.Process(target=ucxx_peer.serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            try:
                message = await transport.inbox.receive()
                endpoint = await transport.connect(message.payload, "child")
                yield Child(process, go_on, transport, endpoint, message.payload)
            finally:
                process.kill()
                process.join()
                process.close()
                go_on.close()


async def test_stamped_slots_are_whole_when_notified_in_another_process(way: str) -> None:
    async with open_child(way) as child:
        for stamp, nbytes in enumerate([1, 4096, 4097, 200_000, 2**20, LARGE] * 2, start=1):
            remote = await child.expose(nbytes)
            await child.endpoint.put(
                memoryview(bytes([stamp]) * nbytes), remote, b"stamped " + bytes([stamp])
            )
            assert await child.answer() == b"ok"
        await child.endpoint.flush()
        await child.endpoint.send(b"stop")
        assert await child.wait() == 0


async def test_a_put_from_another_process_is_whole_when_notified(way: str) -> None:
    async with open_child(way) as child:
        slot, remote = child.exposed_here(LARGE)
        await child.ask_to_put(remote)
        assert await child.answer() == b"put"
        assert slot == b"\1" * LARGE
        assert await child.ask(b"counters") == b"%d" % (LARGE if way == "native" else 0)


async def test_a_killed_receiver_ends_puts_and_sends_that_wait_for_it(way: str) -> None:
    async with open_child(way) as child:
        remote = await child.expose(LARGE)
        child.signal(signal.SIGSTOP)
        lost = []

        async def put() -> None:
            try:
                await child.endpoint.put(memoryview(bytes(LARGE)), remote, b"put")
            except PeerLost:
                lost.append("put")

        async def send() -> None:
            try:
                while True:
                    await child.endpoint.send(b"echo x")
            except PeerLost:
                lost.append("send")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(put)
            tasks.start_soon(send)
            await anyio.wait_all_tasks_blocked()
            assert lost == []
            child.signal(signal.SIGKILL)
        assert sorted(lost) == ["put", "send"] or (lost == ["send"] and not needs_the_receiver(way))
        await child.endpoint.flush()
        with pytest.raises(PeerLost, match="child is gone"):
            await child.endpoint.send(b"echo x")
        await child.endpoint.aclose()


async def test_a_slot_comes_back_when_its_writer_was_killed(way: str) -> None:
    async with open_child(way) as child:
        for _ in range(3):
            remotes = [child.exposed_here(LARGE)[1] for _ in range(2)]
            for remote in remotes:
                await child.ask_to_put(remote)
            await child.answer()
        child.signal(signal.SIGKILL)
        await child.wait()
        assert all([await child.transport.withdraw(remote) for remote in remotes])
        with pytest.raises(PeerLost):
            while True:
                await child.endpoint.send(b"echo x")


async def test_connecting_to_a_dead_process_is_a_lost_peer(way: str) -> None:
    async with open_child(way) as child, UcxxTransport("late", native=way == "native") as late:
        assert await child.ask(b"echo x") == b"x"
        child.process.kill()
        await child.wait()
        with pytest.raises(PeerLost):
            await late.connect(child.address, "child")


async def test_closing_is_bounded_when_the_peer_does_not_answer(way: str) -> None:
    async with open_child(way, close_timeout_s=0.05) as child:
        child.signal(signal.SIGSTOP)
        with anyio.fail_after(5):
            await child.endpoint.aclose()
            await child.transport.aclose()


async def test_closing_ends_what_waits_for_a_peer_that_does_not_answer(way: str) -> None:
    """The peer lives, so that nothing proves its reading to be over: `flush` says so."""
    async with open_child(way, close_timeout_s=0.05) as child:
        remote = await child.expose(LARGE)
        child.signal(signal.SIGSTOP)
        ended = []

        async def end(name: str, call: Callable[[], Awaitable[object]]) -> None:
            with pytest.raises(EndpointClosed):
                await call()
            ended.append(name)

        async with anyio.create_task_group() as tasks:
            if needs_the_receiver(way):
                source = memoryview(bytes(LARGE))
                tasks.start_soon(end, "put", lambda: child.endpoint.put(source, remote, b"put"))
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(end, "flush", child.endpoint.flush)
            tasks.start_soon(end, "connect", lambda: child.transport.connect(child.address, "child"))
            await anyio.wait_all_tasks_blocked()
            assert ended == []
            with anyio.fail_after(5):
                await child.transport.aclose()
        assert sorted(ended) == ["connect", "flush", "put"][: 3 if needs_the_receiver(way) else 2]
        with pytest.raises(EndpointClosed, match="may still read"):
            await child.endpoint.flush()


async def test_a_receiver_that_holds_its_gil_does_not_stop_arriving_bytes(way: str) -> None:
    async with open_child(way) as child:
        remote = await child.expose(LARGE)
        assert await child.ask(b"hold") == b"holding"
        async with anyio.create_task_group() as tasks:
            source = memoryview(bytes([7]) * LARGE)
            if way == "native":
                await child.endpoint.put(source, remote, b"stamped \7")
            else:
                tasks.start_soon(child.endpoint.put, source, remote, b"stamped \7")
                await anyio.wait_all_tasks_blocked()
            child.go_on.send_bytes(b"x")
            assert await child.answer() == b"ok"


async def test_stale_bytes_are_never_notified_in_a_thousand_updates(way: str) -> None:
    nbytes = 50_000
    async with open_child(way) as child:
        remote = await child.expose(nbytes)
        for update in range(1000):
            stamp = bytes([1 + update % 255])
            await child.endpoint.put(memoryview(stamp * nbytes), remote, b"stamped " + stamp)
            assert await child.answer() == b"ok"
            remote = RemoteSlot(await child.ask(b"again"), nbytes)
        expected = 1000 * nbytes if way == "native" else 0
        assert child.transport.counters["one_sided_nbytes"] == expected


async def test_closing_leaves_no_descriptor_and_no_thread(way: str) -> None:
    first = FORKS.Process(target=int)  # with it the fork server's own descriptors are there
    first.start()
    first.join()
    first.close()
    before = held()
    for _ in range(3):
        async with open_child(way) as child:
            remote = await child.expose(LARGE)
            await child.endpoint.put(memoryview(bytes(LARGE)), remote, b"stamped \0")
            assert await child.answer() == b"ok"
            await child.endpoint.send(b"stop")
            await child.wait()
    with anyio.move_on_after(2):  # the kernel lists a thread a little longer than joining it takes
        while held()[1] - before[1]:
            await anyio.sleep(0.01)
    assert [after - b for after, b in zip(held(), before, strict=True)] == [set(), set()]


def held() -> tuple[set[str], set[str]]:
    """The descriptors and threads of this process."""
    return set(os.listdir("/proc/self/fd")), set(os.listdir("/proc/self/task"))
