"""The sockets of the shared-memory transport: strangers, limits, and what is left afterwards."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest

from wbridge.device.cpu import CpuDevice
from wbridge.errors import ConfigError, PeerLost, ProtocolError
from wbridge.transport import unix_endpoint, unix_incoming
from wbridge.transport.exposure_table import NUM_ENTRIES, TABLE_NBYTES, ExposureTable
from wbridge.transport.shared_memory import SharedMemoryTransport
from wbridge.transport.unix_frames import Hello, Segment, UnixAddress, encode, encode_hello

pytestmark = pytest.mark.anyio
PATIENCE_S = 5.0


def num_open() -> int:
    gc.collect()  # what earlier tests have left
    return len(os.listdir("/proc/self/fd"))


def knock(transport: SharedMemoryTransport) -> tuple[socket.socket, UnixAddress]:
    address = msgspec.msgpack.decode(transport.address, type=UnixAddress)
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.connect(address.name)
    stranger.setblocking(False)
    return stranger, address


async def until(is_so: Callable[[], object]) -> None:
    with anyio.fail_after(PATIENCE_S):
        while not is_so():
            await anyio.lowlevel.checkpoint()


async def test_descriptors_are_given_back_after_each_connection() -> None:
    buffer = CpuDevice().allocate(4096, "pinned", shared=True)
    async with SharedMemoryTransport("receiver") as receiver, SharedMemoryTransport("sender") as sender:
        receiver.register(buffer)
        before = num_open()
        for _ in range(20):
            endpoint = await sender.connect(receiver.address, "receiver")
            await endpoint.put(memoryview(bytearray(8)), receiver.expose(buffer.view[:8], "sender"), b"here")
            assert (await receiver.inbox.receive()).payload == b"here"
            await endpoint.aclose()
        await until(lambda: not receiver._incoming)
        assert num_open() == before
        assert not receiver._exposed
        assert not sender._endpoints


async def test_no_descriptor_is_handed_to_programs_that_are_started() -> None:
    """They would keep the memory of a worker that has ended."""
    before = set(os.listdir("/proc/self/fd"))
    buffer = CpuDevice().allocate(4096, "pinned", shared=True)
    async with SharedMemoryTransport("receiver") as receiver, SharedMemoryTransport("sender") as sender:
        receiver.register(buffer)
        endpoint = await sender.connect(receiver.address, "receiver")
        await endpoint.put(memoryview(bytearray(8)), receiver.expose(buffer.view[:8], "sender"), b"here")
        inherited = []
        for name in set(os.listdir("/proc/self/fd")) - before:
            with suppress(OSError):  # that of the directory itself
                inherited.append(os.get_inheritable(int(name)))
        assert len(inherited) > 4
        assert not any(inherited)


async def test_the_last_entry_of_the_table_is_as_good_as_the_first() -> None:
    buffer = CpuDevice().allocate(4096, "pinned", shared=True)
    async with SharedMemoryTransport("receiver") as receiver, SharedMemoryTransport("sender") as sender:
        receiver.register(buffer)
        receiver._free = iter([NUM_ENTRIES - 1])
        endpoint = await sender.connect(receiver.address, "receiver")
        for _ in range(2):
            await endpoint.put(memoryview(bytearray(8)), receiver.expose(buffer.view[:8], "sender"), b"here")
            assert (await receiver.inbox.receive()).payload == b"here"
        receiver.expose(buffer.view[:8], "sender")
        with pytest.raises(ProtocolError, match=f"{NUM_ENTRIES} slots are exposed at once"):
            receiver.expose(buffer.view[:8], "sender")


def test_a_child_of_a_fork_does_not_keep_the_locks_of_its_parent() -> None:
    """Data loaders fork, and may outlive a trainer that was killed in the middle of a write."""
    memory = os.memfd_create("table", os.MFD_CLOEXEC)
    os.ftruncate(memory, TABLE_NBYTES)
    table, others = ExposureTable(memory), ExposureTable(memory)
    assert table.try_lock(7)
    begun, living = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.close(living[1])
        os.write(begun[1], b"!")
        os.read(living[0], 1)  # until the parent closes its end
        os._exit(0)
    try:
        os.read(begun[0], 1)
        assert not others.try_lock(7), "a fork is not the end of the parent's lock"
        table.close()
        assert others.try_lock(7)
    finally:
        for end in (*begun, *living, memory):
            os.close(end)
        others.close()
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("when", ["connecting", "let in"])
async def test_a_connect_that_is_cancelled_leaves_no_descriptor(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with SharedMemoryTransport("receiver") as receiver, SharedMemoryTransport("sender") as sender:
        before = num_open()
        with anyio.CancelScope() as scope:
            loop = asyncio.get_running_loop()
            if when == "connecting":

                async def cancel_first(*_: Any) -> None:
                    scope.cancel()
                    await anyio.sleep_forever()

                monkeypatch.setattr(loop, "sock_connect", cancel_first)
            else:

                def open_table(descriptor: int) -> ExposureTable:
                    scope.cancel()  # the waiting task has not run yet
                    return ExposureTable(descriptor)

                monkeypatch.setattr(unix_endpoint, "ExposureTable", open_table)
            await sender.connect(receiver.address, "receiver")
        assert scope.cancelled_caught
        await until(lambda: not receiver._incoming)
        assert num_open() == before
        assert not sender._endpoints


async def test_a_stranger_that_says_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unix_incoming, "HELLO_S", 0.0)
    async with SharedMemoryTransport("receiver") as receiver:
        stranger, _ = knock(receiver)
        with stranger:
            await anyio.wait_readable(stranger)
            assert stranger.recv(1) == b""
        assert not receiver._incoming


async def test_who_has_shown_the_secret_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unix_incoming, "HELLO_S", 0.02)
    async with SharedMemoryTransport("receiver") as receiver, SharedMemoryTransport("sender") as sender:
        endpoint = await sender.connect(receiver.address, "receiver")
        await anyio.sleep(0.04)
        await endpoint.send(b"still here")
        assert (await receiver.inbox.receive()).payload == b"still here"


@pytest.mark.parametrize("frame", [encode(Segment(1, 8)), b"?", b"N"])
async def test_a_writer_that_breaks_the_protocol_is_cut_off(
    frame: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with SharedMemoryTransport("receiver") as receiver:
        writer, address = knock(receiver)
        with writer:
            writer.send(encode_hello(Hello(address.secret, "writer")))
            writer.send(frame)
            with caplog.at_level(logging.WARNING):
                await until(lambda: caplog.records)
            assert caplog.records[0].getMessage() == "a writer breaks the protocol"
            assert not receiver._incoming


async def test_without_free_descriptors_accepting_waits_instead_of_spinning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries = 0
    async with SharedMemoryTransport("receiver") as receiver, SharedMemoryTransport("sender") as sender:
        listening = receiver._socket

        class Exhausted:
            fileno, close = listening.fileno, listening.close

            def accept(self) -> object:
                nonlocal tries
                tries += 1
                raise OSError(errno.EMFILE, "too many open files")

        loop = asyncio.get_running_loop()
        again: list[Callable[[], None]] = []
        monkeypatch.setattr(receiver, "_socket", Exhausted())
        monkeypatch.setattr(loop, "call_later", lambda _, call, *args: again.append(call))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sender.connect, receiver.address, "receiver")
            await until(lambda: again)
            for _ in range(20):
                await anyio.lowlevel.checkpoint()
            assert tries == 1
            monkeypatch.undo()
            again[0]()
        assert len(sender._endpoints) == 1


async def test_a_writer_that_gets_no_descriptor_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limit of open files the kernel delivers the frame without it."""
    receive = socket.recv_fds
    monkeypatch.setattr(socket, "recv_fds", lambda *args: (receive(*args)[0], [], 0, None))
    async with SharedMemoryTransport("receiver") as receiver, SharedMemoryTransport("sender") as sender:
        with pytest.raises(ConfigError, match=r"receiver.*0 descriptors.*raise the limit of open files"):
            await sender.connect(receiver.address, "receiver")


async def test_a_secret_of_another_transport_is_refused() -> None:
    async with SharedMemoryTransport("receiver") as receiver, SharedMemoryTransport("sender") as sender:
        address = msgspec.msgpack.decode(receiver.address, type=UnixAddress)
        forged = msgspec.msgpack.encode(UnixAddress(address.name, b"x" * 32))
        with pytest.raises(PeerLost):
            await sender.connect(forged, "receiver")
