"""Slots that only devices reach: the transport names them, lets writers in, and touches nothing itself."""

from __future__ import annotations

import os
import subprocess

import anyio
import anyio.lowlevel
import pytest

from tests.models.far import FAR, FarDevice
from wbridge.config import Config
from wbridge.device.base import HOST, Access
from wbridge.device.cpu import CpuDevice
from wbridge.device.memory import ExportedMemory
from wbridge.errors import NativeUnavailable, ProtocolError
from wbridge.transport import shared_memory
from wbridge.transport.base import Window
from wbridge.transport.host import is_ending
from wbridge.transport.select import Transports, open_transports
from wbridge.transport.shared_memory import SharedMemoryTransport
from wbridge.transport.unix_frames import Segment, decode, encode


def num_open() -> int:
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
            assert far.reaches_slots_on_device(peer.address, endpoint) is reaches
        endpoint = await host.connect(other.address, other.name)
        assert host.reaches_slots_on_device(other.address, endpoint)
        endpoint = await near.connect(near_too.address, near_too.name)
        assert not near.reaches_slots_on_device(near_too.address, endpoint)


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
