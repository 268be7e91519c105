"""Slots that only devices reach: the transport names them, lets writers in, and touches nothing itself."""

from __future__ import annotations

import errno
import gc
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from tests.models.far import FAR, FarDevice
from wbridge.config import Config
from wbridge.device.base import HOST, Access, MemoryKind
from wbridge.device.cpu import CpuDevice
from wbridge.device.memory import ExportedMemory
from wbridge.errors import NativeUnavailable, ProtocolError
from wbridge.transport import shared_memory
from wbridge.transport.base import Window
from wbridge.transport.host import is_ending
from wbridge.transport.select import Transports, open_transports
from wbridge.transport.shared_memory import SharedMemoryTransport
from wbridge.transport.unix_frames import Segment, SegmentEnd, decode, encode
from wbridge.transport.unix_incoming import UnixIncoming


def num_open() -> int:
    gc.collect()  # what earlier tests have left
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.anyio
async def test_a_writer_opens_the_memory_and_notifies() -> None:
    owner, writer = FarDevice(), FarDevice()
    buffer = owner.allocate(5000, "device", shared=True)
    async with SharedMemoryTransport("receiver") as receiver, SharedMemoryTransport("sender") as sender:
        receiver.register(buffer)
        before = num_open()
        endpoint = await sender.connect(receiver.address, "receiver")
        seen: list[object] = []

        async def write(window: Window) -> bytes:
            opened = writer.adopt(window.memory)
            opened.tensor[window.offset : window.offset + window.nbytes] = 7
            seen.append(window.memory)
            return b"here"

        for start in (10, 4000):
            await endpoint.fill(receiver.expose(buffer.addresses[start : start + 100], "sender"), write)
            assert (await receiver.inbox.receive()).payload == b"here"
        assert seen[0] is seen[1], "one segment is opened once"
        assert buffer.tensor.nonzero().flatten().tolist() == [*range(10, 110), *range(4000, 4100)]
        await endpoint.aclose()
        seen.clear()
        with anyio.fail_after(5.0):
            while receiver._incoming:
                await anyio.lowlevel.checkpoint()
        assert num_open() == before


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["device", "pinned"])
async def test_writers_let_go_of_memory_that_is_exposed_no_more(kind: MemoryKind) -> None:
    """One that came for the next epoch early would keep the last one's slots for that long."""
    buffer = FarDevice().allocate(5000, kind, shared=True)
    async with SharedMemoryTransport("receiver") as receiver, SharedMemoryTransport("sender") as sender:
        endpoint = await sender.connect(receiver.address, "receiver")
        before = num_open()
        receiver.register(buffer)
        remote = receiver.expose(buffer.addresses[:100], "sender")
        with anyio.fail_after(5.0):
            while 1 not in endpoint._segments:
                await endpoint._news.wait()
            assert num_open() > before
            receiver.unregister(buffer)
            receiver.unregister(buffer)
            while endpoint._segments[1] is not None:
                await endpoint._news.wait()
            assert num_open() == before
            await endpoint.fill(remote, lambda _: pytest.fail("wrote"))
            assert await receiver.withdraw(remote)


@pytest.mark.anyio
async def test_host_code_that_wants_the_bytes_is_refused_and_leaves_the_slot() -> None:
    buffer = FarDevice().allocate(4096, "device", shared=True)
    async with SharedMemoryTransport("receiver") as receiver, SharedMemoryTransport("sender") as sender:
        receiver.register(buffer)
        endpoint = await sender.connect(receiver.address, "receiver")
        remote = receiver.expose(buffer.addresses[:64], "sender")
        with pytest.raises(ProtocolError, match="slot on a GPU"):
            await endpoint.put(memoryview(bytearray(64)), remote, b"here")
        with anyio.fail_after(5.0):
            assert await receiver.withdraw(remote)
        with pytest.raises(NativeUnavailable, match="receiver_overlap"):
            memory = endpoint._segments[1]
            assert isinstance(memory, ExportedMemory)
            CpuDevice().adopt(memory)


@pytest.mark.parametrize("is_host", [True, False])
def test_segments_say_whose_memory_they_are(is_host: bool) -> None:
    assert decode(encode(Segment(3, 2**40, is_host)), "a peer") == Segment(3, 2**40, is_host)
    assert decode(encode(SegmentEnd(3)), "a peer") == SegmentEnd(3)


@pytest.mark.anyio
async def test_workers_know_who_writes_their_device_memory() -> None:
    def opened(name: str, process: str, access: Access, transport: str = "shared_memory") -> Transports:
        config = Config(transport=transport)  # type: ignore[arg-type]  # one of the literals
        return open_transports(config, process, name=name, access=access)

    on_host, elsewhere = Access(), Access("GPU b", (HOST, "GPU b"))
    async with (
        opened("far", "1", FAR) as far,
        opened("same", "2", FAR) as same,
        opened("host", "3", on_host) as host,
        opened("other", "4", elsewhere) as other,
        opened("near", "5", FAR, "loopback") as near,
        opened("near too", "5", FAR, "loopback") as near_too,
    ):
        for peer, reaches in ((same, True), (host, False), (other, False)):
            endpoint = await far.connect(peer.address, peer.name)
            why = far.why_not_on_device(peer.address, endpoint)
            assert (why is None) is reaches
            assert why is None or f"{peer.name} does not reach GPU far" in why
        endpoint = await host.connect(other.address, other.name)
        assert host.why_not_on_device(other.address, endpoint) is None
        barred = opened("barred", "6", Access(memory=""))
        assert "is let into" in str(barred.why_not_on_device(other.address, endpoint))
        endpoint = await near.connect(near_too.address, near_too.name)
        assert "in this process" in str(near.why_not_on_device(near_too.address, endpoint))


@pytest.mark.anyio
async def test_a_slot_of_a_writer_that_is_ending_is_not_taken_back_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its lock is gone, and a GPU may still write for it."""
    asked: list[int] = []

    def is_ending(pid: int) -> bool:
        asked.append(pid)
        return len(asked) < 4

    monkeypatch.setattr(shared_memory, "is_ending", is_ending)
    buffer = FarDevice().allocate(4096, "device", shared=True)
    async with SharedMemoryTransport("receiver") as receiver, SharedMemoryTransport("sender") as sender:
        receiver.register(buffer)
        await sender.connect(receiver.address, "receiver")
        with anyio.fail_after(5.0):
            assert await receiver.withdraw(receiver.expose(buffer.addresses[:64], "sender"))
    assert asked == [os.getpid()] * 4


@pytest.mark.anyio
async def test_a_writer_is_ending_although_its_successor_of_the_same_name_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ending = os.getpid() + 1
    looks: list[bool] = []

    class Predecessor(UnixIncoming):
        def __init__(self, connection: socket.socket, **more: Any) -> None:  # as the original has them
            super().__init__(connection, **more)
            self.pid = ending

    def is_ending(pid: int) -> bool:
        if pid == ending:
            looks.append(len(looks) < 2)
        return pid == ending and looks[-1]

    monkeypatch.setattr(shared_memory, "is_ending", is_ending)
    buffer = FarDevice().allocate(4096, "device", shared=True)
    async with SharedMemoryTransport("receiver") as receiver, SharedMemoryTransport("sender") as sender:
        receiver.register(buffer)
        with monkeypatch.context() as patch:
            patch.setattr(shared_memory, "UnixIncoming", Predecessor)
            await sender.connect(receiver.address, "receiver")
        await sender.connect(receiver.address, "receiver")
        with anyio.fail_after(5.0):
            assert await receiver.withdraw(receiver.expose(buffer.addresses[:64], "sender"))
    assert looks == [True, True, False]


@pytest.mark.anyio
async def test_memory_is_shown_to_all_when_a_writer_has_gone_unnoticed() -> None:
    buffer = FarDevice().allocate(4096, "device", shared=True)
    async with SharedMemoryTransport("receiver") as receiver, SharedMemoryTransport("sender") as sender:
        endpoints = [await sender.connect(receiver.address, "receiver") for _ in range(3)]
        for endpoint in endpoints[:2]:
            endpoint._end(endpoint._closed_error)
        receiver.register(buffer)
        with anyio.fail_after(5.0):
            assert isinstance(await endpoints[2]._segment(1), ExportedMemory)


@pytest.mark.parametrize(("state", "threads", "expected"), [("D", 1, True), ("Z", 2, True), ("Z", 1, False)])
def test_a_process_is_ending_until_its_last_thread_is_over(
    state: str, threads: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = 0x400004
    status = f"7 (a ) name) {state} 1 7 7 0 -1 {flags} 0 0 0 0 0 0 0 0 20 0 {threads} 0 99 0 0"
    monkeypatch.setattr(Path, "read_text", lambda _: status)
    assert is_ending(7) is expected


@pytest.mark.parametrize(("code", "expected"), [(errno.EMFILE, True), (errno.EACCES, False)])
def test_a_process_that_cannot_be_asked_after_now_has_not_ended(
    code: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_text(_: Path) -> str:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "read_text", read_text)
    assert is_ending(os.getpid()) is expected


def test_a_process_is_ending_from_its_first_closed_file_to_its_last() -> None:
    child = subprocess.Popen(["sleep", "60"])
    assert not is_ending(os.getpid())
    assert not is_ending(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_ending(child.pid), "it has ended, and only waits to be asked how"
    child.wait()
    assert not is_ending(child.pid)
    assert not is_ending(0)
