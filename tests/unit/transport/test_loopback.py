"""The loopback transport across event loops and threads, and what its parts promise alone."""

from __future__ import annotations

import gc
import threading
import weakref

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest

from wbridge.errors import PeerLost, ProtocolError
from wbridge.transport.base import Message, RemoteSlot
from wbridge.transport.exposures import Exposures
from wbridge.transport.inbox import Inbox
from wbridge.transport.loopback import LoopbackTransport

pytestmark = pytest.mark.anyio


async def test_two_adapters_with_loops_of_their_own_exchange_puts() -> None:
    """As a trainer and a rollout of one process do."""
    num_puts, nbytes = 40, 300_000
    ready, addresses, slots = threading.Event(), [], []

    async def receive() -> None:
        async with LoopbackTransport("receiver") as receiver:
            slot = bytearray(nbytes)
            addresses.append(receiver.address)
            ready.set()
            hello = await receiver.inbox.receive()
            back = await receiver.connect(hello.payload, "sender")
            for k in range(num_puts):
                await back.send(receiver.expose(memoryview(slot), "sender").token)
                message = await receiver.inbox.receive()
                assert (message.peer, message.payload) == ("sender", bytes([k]))
                slots.append(bytes(slot) == bytes([k]) * nbytes)

    async def send() -> None:
        await anyio.to_thread.run_sync(ready.wait)
        async with LoopbackTransport("sender") as sender:
            endpoint = await sender.connect(addresses[0], "receiver")
            await endpoint.send(sender.address)
            for k in range(num_puts):
                token = (await sender.inbox.receive()).payload
                await endpoint.put(memoryview(bytearray([k]) * nbytes), RemoteSlot(token, nbytes), bytes([k]))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.to_thread.run_sync, lambda: anyio.run(receive))
        tasks.start_soon(anyio.to_thread.run_sync, lambda: anyio.run(send))
    assert slots == [True] * num_puts


async def test_an_inbox_is_filled_and_emptied_from_different_loops_without_loss() -> None:
    inbox, count = Inbox("owner", capacity=3), 400

    async def fill() -> None:
        for k in range(count):
            await inbox.deliver(Message("peer", k.to_bytes(2, "little")))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.to_thread.run_sync, lambda: anyio.run(fill))
        received = [int.from_bytes((await inbox.receive()).payload, "little") for _ in range(count)]
    assert received == list(range(count))


async def test_a_cancelled_delivery_is_not_delivered_and_gives_its_turn_to_the_next() -> None:
    inbox = Inbox("owner", capacity=1)
    await inbox.deliver(Message("peer", b"0"))
    async with anyio.create_task_group() as tasks:
        async with anyio.create_task_group() as cancelled:
            cancelled.start_soon(inbox.deliver, Message("peer", b"1"))
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(inbox.deliver, Message("peer", b"2"))
            await anyio.wait_all_tasks_blocked()
            cancelled.cancel_scope.cancel()
        assert [(await inbox.receive()).payload for _ in range(2)] == [b"0", b"2"]


async def test_a_turn_cancelled_after_it_came_is_given_on() -> None:
    inbox = Inbox("owner", capacity=1)
    await inbox.deliver(Message("peer", b"0"))
    async with anyio.create_task_group() as tasks:
        async with anyio.create_task_group() as cancelled:
            cancelled.start_soon(inbox.deliver, Message("peer", b"1"))
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(inbox.deliver, Message("peer", b"2"))
            await anyio.wait_all_tasks_blocked()
            assert (await inbox.receive()).payload == b"0"  # the room is now reserved for 1
            cancelled.cancel_scope.cancel()
        assert (await inbox.receive()).payload == b"2"


async def test_closing_an_inbox_releases_senders_and_ends_the_reader() -> None:
    inbox = Inbox("owner", capacity=1)
    await inbox.deliver(Message("peer", b"0"))
    lost = []

    async def deliver() -> None:
        try:
            await inbox.deliver(Message("peer", b"1"))
        except PeerLost:
            lost.append(True)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(deliver)
        await anyio.wait_all_tasks_blocked()
        inbox.close()
    assert lost == [True]
    assert [message.payload async for message in inbox] == [b"0"]


async def test_a_message_for_a_loop_that_has_ended_is_no_error() -> None:
    inbox = Inbox("owner")

    async def give_up() -> None:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(inbox.receive)
                await anyio.wait_all_tasks_blocked()
                scope.cancel()

    await anyio.to_thread.run_sync(lambda: anyio.run(give_up))
    await inbox.deliver(Message("peer", b"0"))
    assert (await inbox.receive()).payload == b"0"


async def test_an_address_of_a_closed_transport_is_a_lost_peer() -> None:
    async with LoopbackTransport("a") as a:
        async with LoopbackTransport("b") as b:
            address = b.address
        with pytest.raises(PeerLost, match="a: b has no open transport"):
            await a.connect(address, "b")


async def test_the_registry_does_not_keep_a_transport_alive() -> None:
    transport = await LoopbackTransport("forgotten").__aenter__()
    reference = weakref.ref(transport)
    del transport
    gc.collect()
    assert reference() is None


async def test_withdrawing_waits_for_a_write_that_has_begun() -> None:
    exposures = Exposures()
    remote = exposures.expose(memoryview(bytearray(4)))
    assert exposures.begin(remote.token, 4) is not None
    assert exposures.begin(remote.token, 4) is None, "one put per slot"
    withdrawn = []

    async def withdraw() -> None:
        withdrawn.append(await exposures.withdraw(remote))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(withdraw)
        await anyio.wait_all_tasks_blocked()
        assert withdrawn == []
        exposures.finish(remote.token)
    assert withdrawn == [True]


async def test_a_write_whose_writer_is_out_of_reach_cannot_be_proved_over() -> None:
    exposures = Exposures()
    remote = exposures.expose(memoryview(bytearray(4)))
    exposures.begin(remote.token, 4)
    withdrawn = []

    async def withdraw() -> None:
        withdrawn.append(await exposures.withdraw(remote))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(withdraw)
        await anyio.wait_all_tasks_blocked()
        exposures.doubt(remote.token)
    assert withdrawn == [False]
    assert not await exposures.withdraw(remote)
    exposures.finish(remote.token)
    assert await exposures.withdraw(remote)


async def test_c23_an_empty_descriptor_among_others_poisons_nothing() -> None:
    async with LoopbackTransport("a") as a, LoopbackTransport("b") as b:
        endpoint = await a.connect(b.address, "b")
        slots = [bytearray(nbytes) for nbytes in (16, 0, 16)]
        async with anyio.create_task_group() as tasks:
            for slot in slots:
                remote = b.expose(memoryview(slot), "a")
                tasks.start_soon(endpoint.put, memoryview(b"\1" * len(slot)), remote, b"put")
        assert [(await b.inbox.receive()).payload for _ in slots] == [b"put"] * 3
        assert slots == [b"\1" * 16, b"", b"\1" * 16]


def test_only_whole_writable_contiguous_memory_is_exposed() -> None:
    exposures = Exposures()
    for memory in (memoryview(b"read-only"), memoryview(bytearray(8))[::2]):
        with pytest.raises(ProtocolError, match="writable and contiguous"):
            exposures.expose(memory)
    remote = exposures.expose(memoryview(bytearray(8)))
    with pytest.raises(ProtocolError, match="put the whole slot"):
        exposures.begin(remote.token, 4)
    assert exposures.begin(remote.token, 8) is not None
