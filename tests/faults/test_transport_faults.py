"""Fault injection itself, and the failures that need a slow or lossy transport to show."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
import torch

from wbridge.device.cpu import CpuDevice
from wbridge.errors import PeerLost
from wbridge.ids import WorkerId
from wbridge.layout.region import Strided
from wbridge.plan.types import Group, Piece, Transfer
from wbridge.staging.checksum import checksum
from wbridge.staging.direct import DirectReceiver, DirectSender
from wbridge.staging.slots import LocalSlots
from wbridge.testing.faults import Faults, FaultyTransport
from wbridge.transport.loopback import LoopbackTransport

pytestmark = pytest.mark.anyio

TRAINER = WorkerId("trainer", "trainer", (1,), (0,))
ROLLOUT = WorkerId("rollout", "engine", (1,), (0,))


@asynccontextmanager
async def faulty_pair(
    sending: Faults | None = None, receiving: Faults | None = None
) -> AsyncIterator[tuple[FaultyTransport, FaultyTransport]]:
    async with (
        LoopbackTransport("sender") as inner,
        LoopbackTransport("receiver") as peer,
        FaultyTransport(inner, sending) as sender,
        FaultyTransport(peer, receiving) as receiver,
    ):
        yield sender, receiver


async def test_held_operations_wait_for_release() -> None:
    async with faulty_pair() as (sender, receiver):
        endpoint = await sender.connect(receiver.address, "receiver")
        slot = bytearray(8)
        remote = receiver.expose(memoryview(slot), "sender")
        sender.hold()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(endpoint.put, memoryview(b"\1" * 8), remote, b"put")
            await anyio.wait_all_tasks_blocked()
            assert not any(slot)
            sender.release()
        assert (await receiver.inbox.receive()).payload == b"put"


async def test_a_lost_put_is_notified_without_its_bytes_and_a_checksum_tells() -> None:
    async with faulty_pair(receiving=Faults(lose_exposures=frozenset({1}))) as (sender, receiver):
        endpoint = await sender.connect(receiver.address, "receiver")
        sent = checksum(memoryview(b"\1" * 8))
        arrived = []
        for _ in range(3):
            slot = bytearray(8)
            await endpoint.put(memoryview(b"\1" * 8), receiver.expose(memoryview(slot), "sender"), b"put")
            assert (await receiver.inbox.receive()).payload == b"put"
            arrived.append(checksum(memoryview(slot)) == sent)
        assert arrived == [True, False, True]
        assert receiver.num_lost == 1


async def test_an_endpoint_dies_after_its_count_and_running_calls_end() -> None:
    async with faulty_pair(Faults(cut_after={"receiver": 2})) as (sender, receiver):
        endpoint = await sender.connect(receiver.address, "receiver")
        other = await sender.connect(receiver.address, "other name")
        await endpoint.send(b"0")
        lost = []

        async def send(payload: bytes) -> None:
            try:
                await endpoint.send(payload)
            except PeerLost:
                lost.append(payload)

        sender.hold()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send, b"1")
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(send, b"2")
            await anyio.wait_all_tasks_blocked()
            sender.release()
        assert sorted(lost) == [b"1", b"2"]
        await other.send(b"alive")
        await sender.cut("other name")
        with pytest.raises(PeerLost, match="cut off by fault injection"):
            await other.send(b"dead")
        assert [(await receiver.inbox.receive()).payload for _ in range(2)] == [b"0", b"alive"]


async def arrival_order(seed: int) -> list[bytes]:
    async with faulty_pair(Faults(seed=seed, hold_rate=0.7)) as (sender, receiver):
        endpoints = [await sender.connect(receiver.address, f"way {k}") for k in range(3)]

        async def send(k: int) -> None:
            for n in range(5):
                await endpoints[k].send(bytes([k, n]))

        async with anyio.create_task_group() as tasks:
            for k in range(3):
                tasks.start_soon(send, k)
        return [(await receiver.inbox.receive()).payload for _ in range(15)]


async def test_endpoints_overtake_each_other_the_same_way_in_every_run() -> None:
    orders = [await arrival_order(seed) for seed in range(5)]
    assert orders == [await arrival_order(seed) for seed in range(5)]
    assert len({tuple(order) for order in orders}) > 1
    for order in orders:
        for k in range(3):
            own = [payload for payload in order if payload[0] == k]
            assert own == sorted(own), "one endpoint keeps its order"


def strided_piece() -> Piece:
    """A column slice of a transposed parameter: it has to be made contiguous somewhere."""
    transfer = Transfer(
        tensor="x",
        extents=(4, 3),
        source_parameter="p",
        source=Strided(1, (1, 8)),
        target_parameter="q",
        target=Strided(0, (3, 1)),
        wire=Strided(0, (3, 1)),
        wire_dtype="float32",
        slot_offset=0,
    )
    return Piece(writer=TRAINER, offset=0, nbytes=48, transfers=(transfer,))


async def _acquire(slots: LocalSlots, acquired: list[object]) -> None:
    acquired.append(await slots.acquire())


async def test_c25_the_contiguous_copy_lives_until_the_slow_put_has_stopped() -> None:
    piece, device = strided_piece(), CpuDevice(seed=2)
    live, written = {"p": torch.arange(24.0)}, {"q": torch.zeros(4, 3)}
    expected = live["p"].as_strided((4, 3), (1, 8), 1).clone()
    sender_staging = DirectSender(device, live, (piece,), local_slots=1)
    group = Group(receiver=ROLLOUT, index=0, nbytes=48, pieces=(piece,))
    receiver_staging = DirectReceiver(device, written, (group,), num_slots=1, takes_parked=True)
    async with faulty_pair() as (sender, receiver):
        endpoint = await sender.connect(receiver.address, "receiver")
        remote = receiver.expose(receiver_staging.slot_view(0, 0, 48), "sender")
        source = await sender_staging.snapshot(device.current_stream().record())
        slots = sender_staging.open_slots(48)
        slot = await slots.acquire()
        await source.gather(piece, slot.place).wait()
        sender.hold()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(endpoint.put, slot.view(48), remote, b"put")
            await anyio.wait_all_tasks_blocked()
            live["p"].fill_(float("nan"))
            gc.collect()
            acquired = []
            async with anyio.create_task_group() as waiting:
                waiting.start_soon(_acquire, slots, acquired)
                await anyio.wait_all_tasks_blocked()
                waiting.cancel_scope.cancel()
            assert acquired == [], "the slot is busy while the put may read it"
            sender.release()
        slots.release(slot)
        assert (await receiver.inbox.receive()).payload == b"put"
    await receiver_staging.scatter(group, 0).wait()
    assert torch.equal(written["q"], expected)
    device.close()


async def test_c41_no_notification_comes_before_its_data() -> None:
    """With many puts held for different times, each notified slot is whole at that moment."""
    num_slots, nbytes = 24, 64 * 1024
    async with faulty_pair(Faults(seed=4, hold_rate=0.8, max_passes=30)) as (sender, receiver):
        endpoints = [await sender.connect(receiver.address, f"way {k}") for k in range(4)]
        slots = [bytearray(nbytes) for _ in range(num_slots)]
        async with anyio.create_task_group() as tasks:
            for k, slot in enumerate(slots):
                source = memoryview(bytes([k + 1]) * nbytes)
                remote = receiver.expose(memoryview(slot), "sender")
                tasks.start_soon(endpoints[k % 4].put, source, remote, bytes([k]))
            order = []
            for _ in slots:
                k = (await receiver.inbox.receive()).payload[0]
                order.append(k)
                assert slots[k] == bytes([k + 1]) * nbytes
        assert order != sorted(order), "the faults did reorder"
