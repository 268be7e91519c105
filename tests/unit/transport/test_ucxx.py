"""The ucxx transport where a put outlives its endpoint, or its writer comes back another."""

from __future__ import annotations

import os
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import msgspec
import pytest

from wbridge.device.cpu import CpuDevice
from wbridge.device.runs import Run, Runs
from wbridge.errors import ConfigError
from wbridge.native.ucx import why_missing
from wbridge.testing.pairs import Pair
from wbridge.transport.base import Endpoint, RemoteSlot
from wbridge.transport.ucxx import UcxxTransport

pytestmark = pytest.mark.anyio

LARGE_NBYTES = 128 * 2**20
"""So long that the put still runs when its endpoint closes."""


@asynccontextmanager
async def open_pair(receiver_host: str = "b") -> AsyncIterator[Pair]:
    """Whose sender gives up its peers at once."""
    if (why := why_missing()) is not None:
        pytest.skip(why)
    async with (
        UcxxTransport("sender", host="a", native=True, close_timeout_s=0) as sender,
        UcxxTransport("receiver", host=receiver_host, native=True) as receiver,
    ):
        yield Pair(sender, receiver, CpuDevice())


async def start_to_put(pair: Pair, endpoint: Endpoint) -> RemoteSlot:
    """Return while the put, cancelled, runs on."""
    (slot,) = pair.slots([LARGE_NBYTES])
    remote = pair.receiver.expose(slot, "sender")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(endpoint.put, memoryview(b"\1" * LARGE_NBYTES), remote, b"put")
        while not slot[0]:
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    return remote


async def test_a_transport_closes_while_a_slot_that_it_writes_is_taken_back() -> None:
    async with open_pair() as pair:
        remote = await start_to_put(pair, await pair.connect())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pair.receiver.withdraw, remote)
            await anyio.wait_all_tasks_blocked()
            await pair.receiver.connect(pair.sender.address, "sender")  # which has heard of both by now
            await pair.sender.aclose()
            tasks.cancel_scope.cancel()


async def test_a_slot_comes_back_when_its_put_ends_after_its_endpoint() -> None:
    async with open_pair() as pair:
        endpoint = await pair.connect()
        remote = await start_to_put(pair, endpoint)
        await endpoint.aclose()
        with anyio.fail_after(10):
            assert await pair.receiver.withdraw(remote)


async def test_a_writer_that_comes_back_without_the_native_part_sends_messages() -> None:
    pytest.importorskip("ucxx", reason="the install without extras has no ucxx")
    async with open_pair() as pair:
        await pair.connect()
        async with UcxxTransport("sender", host="a", native=False) as sender:
            again = Pair(sender, pair.receiver)
            endpoint = await again.connect()
            (slot,) = again.slots([100_000])
            remote = pair.receiver.expose(slot, "sender")
            with anyio.fail_after(10):
                await endpoint.put(memoryview(b"\1" * 100_000), remote, b"put")
                assert await again.receive() == b"put"
            assert slot == b"\1" * 100_000


async def test_a_cancelled_connection_is_granted_nothing() -> None:
    async with open_pair() as pair:
        endpoint = await pair.connect()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pair.connect)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        (slot,) = pair.slots([100_000])
        with anyio.fail_after(10):
            await endpoint.send(b"cancelled before")
            assert await pair.receive() == b"cancelled before"
            remote = pair.receiver.expose(slot, "sender")
            await endpoint.put(memoryview(b"\1" * 100_000), remote, b"put")
            assert await pair.receive() == b"put"


async def test_c72_a_buffer_that_could_not_be_registered_is_not_taken_for_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The system has refused it once; the next time it is registered after all, and written."""
    async with open_pair() as pair:
        endpoint = await pair.connect()
        await start_to_put(pair, endpoint)  # from here on buffers are registered as they come
        regions, buffer = pair.receiver._regions, CpuDevice().allocate(2**20, "pinned")
        assert regions is not None and regions._is_needed
        with monkeypatch.context() as refusing:
            refusing.setattr(regions._worker, "map", raise_config_error)
            with pytest.raises(ConfigError, match="refused"):
                pair.receiver.register(buffer)
        assert regions.locate(buffer.view) is None
        pair.receiver.register(buffer)
        assert regions.locate(buffer.view) is not None


def raise_config_error(memory: memoryview, kind: str) -> None:
    raise ConfigError(f"{memory.nbytes} bytes of kind {kind} are refused")


async def test_runs_go_where_they_belong_and_each_grant_is_used_once() -> None:
    async with open_pair(receiver_host="a") as pair:
        endpoint = await pair.connect()
        assert endpoint.put_runs is not None
        (whole,) = pair.slots([100_000])
        source = bytearray(range(256)) * 400
        runs = Runs([Run(5, 90_000, 9_000), Run(50_000, 7, 20_000)]).read_from(memoryview(source))
        first, second = (
            msgspec.structs.replace(pair.receiver.expose(whole, "sender"), nbytes=29_000) for _ in "12"
        )
        await endpoint.put_runs(second, runs, b"second")
        assert await pair.receive() == b"second"
        wanted = bytearray(100_000)
        wanted[90_000:99_000], wanted[7:20_007] = source[5:9_005], source[50_000:70_000]
        assert whole == wanted
        await endpoint.put_runs(second, runs, b"again")  # which writes nothing and says nothing
        await endpoint.put_runs(first, runs, b"first")
        assert await pair.receive() == b"first"
        third = msgspec.structs.replace(pair.receiver.expose(whole, "sender"), nbytes=29_000)
        assert await pair.receiver.withdraw(third)
        await endpoint.put_runs(third, runs, b"third")
        await endpoint.send(b"end")
        assert await pair.receive() == b"end"


async def test_who_is_on_another_host_takes_no_runs() -> None:
    async with open_pair() as pair:
        assert (await pair.connect()).put_runs is None


async def test_a_process_that_may_open_too_few_files_is_told_before_ucx_ends_it() -> None:
    if (why := why_missing()) is not None:
        pytest.skip(why)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 10, hard))
        with pytest.raises(ConfigError, match=r"sender: \d+ of the \d+ files .* raise the limit"):
            await UcxxTransport("sender", host="a", native=True).__aenter__()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
