"""The four stagings: what they hold, copy, wait for and give back."""

from __future__ import annotations

import functools
import os

import anyio
import pytest
import torch
import xxhash

from tests.models.far import FarDevice
from wbridge.device.cpu import CpuDevice
from wbridge.device.memory import ExportedMemory
from wbridge.errors import InternalError
from wbridge.ids import WorkerId
from wbridge.layout.region import Strided
from wbridge.plan.types import Group, Piece, Transfer
from wbridge.staging.base import ReceiverStaging, SenderStaging
from wbridge.staging.checksum import checksum
from wbridge.staging.direct import DirectReceiver, DirectSender
from wbridge.staging.pinned import PinnedReceiver, PinnedSender
from wbridge.staging.slots import Place

pytestmark = pytest.mark.anyio

TRAINER = WorkerId("trainer", "trainer", (1,), (0,))
ROLLOUT = WorkerId("rollout", "engine", (1,), (0,))
SENDERS = ("direct", "pinned")
RECEIVERS = (functools.partial(DirectReceiver, takes_parked=True), PinnedReceiver)


def transfer(k: int, *, slot_offset: int) -> Transfer:
    """Two rows of 4 floats from `s{k}`, narrowed to bfloat16, into both halves of `t{k}`."""
    return Transfer(
        tensor=f"x{k}",
        extents=(2, 2, 4),
        source_parameter=f"s{k}",
        source=Strided(0, (0, 4, 1)),
        target_parameter=f"t{k}",
        target=Strided(0, (8, 4, 1)),
        wire=Strided(0, (0, 4, 1)),
        wire_dtype="bfloat16",
        slot_offset=slot_offset,
    )


PIECES = tuple(
    Piece(writer=TRAINER, offset=16 * k, nbytes=16, transfers=(transfer(k, slot_offset=16 * k),))
    for k in range(2)
)
LARGEST = 16
GROUP = Group(receiver=ROLLOUT, index=0, nbytes=32, pieces=PIECES)


def sources() -> dict[str, torch.Tensor]:
    live = {f"s{k}": torch.arange(8.0).reshape(2, 4) + 10 * k for k in range(2)}
    return live | {"frozen": torch.zeros(1000)}


def targets() -> dict[str, torch.Tensor]:
    return {f"t{k}": torch.zeros(4, 4) for k in range(2)}


def open_sender(
    kind: str, device: CpuDevice, parameters: dict[str, torch.Tensor], snapshots: int = 2
) -> SenderStaging:
    if kind == "direct":
        return DirectSender(device, parameters, PIECES, local_slots=2)
    return PinnedSender(device, parameters, PIECES, local_slots=2, snapshot_versions=snapshots)


@pytest.fixture(params=[None, 0, 5])
def device(request: pytest.FixtureRequest):
    device = CpuDevice(seed=request.param)
    yield device
    device.close()


@pytest.mark.parametrize("sender_kind", SENDERS)
@pytest.mark.parametrize("receiver_kind", RECEIVERS, ids=["direct", "pinned"])
async def test_what_is_gathered_is_scattered(device: CpuDevice, sender_kind: str, receiver_kind) -> None:
    live, written = sources(), targets()
    sender: SenderStaging = open_sender(sender_kind, device, live)
    receiver: ReceiverStaging = receiver_kind(device, written, (GROUP,), num_slots=2)
    source = await sender.snapshot(device.current_stream().record())
    slots = sender.open_slots(LARGEST)
    for piece in PIECES:
        slot = await slots.acquire()
        await source.gather(piece, slot.place).wait()
        receiver.slot_view(1, piece.offset, piece.nbytes)[:] = slot.view(piece.nbytes)
        slots.release(slot)
    source.release()
    await receiver.scatter(GROUP, 1).wait()
    for k in range(2):
        assert torch.equal(written[f"t{k}"], torch.cat([live[f"s{k}"]] * 2))
    sender.close()
    receiver.close()


@pytest.mark.parametrize("kind", SENDERS)
async def test_a_source_waits_for_the_callers_stream(device: CpuDevice, kind: str) -> None:
    live = sources()
    sender, caller = open_sender(kind, device, live), device.open_stream("caller")
    caller.submit(lambda: live["s0"].add_(1))
    source = await sender.snapshot(caller.record())
    slot = await sender.open_slots(LARGEST).acquire()
    await source.gather(PIECES[0], slot.place).wait()
    assert torch.equal(slot.buffer.tensor.view(torch.bfloat16).float(), torch.arange(8.0) + 1)


@pytest.mark.parametrize("kind", SENDERS)
async def test_c47_only_a_snapshot_allows_the_weights_to_change(device: CpuDevice, kind: str) -> None:
    live = sources()
    sender = open_sender(kind, device, live)
    source = await sender.snapshot(device.current_stream().record())
    live["s0"].fill_(-1)
    slot = await sender.open_slots(LARGEST).acquire()
    await source.gather(PIECES[0], slot.place).wait()
    old = torch.equal(slot.buffer.tensor.view(torch.bfloat16).float(), torch.arange(8.0))
    assert old is not sender.holds_live_weights


async def test_a_snapshot_copies_only_what_is_sent(device: CpuDevice) -> None:
    sender = PinnedSender(device, sources(), PIECES, local_slots=1, snapshot_versions=1)
    source = await sender.snapshot(device.current_stream().record())
    assert source._version.mirror.nbytes == 2 * 64


async def test_snapshots_are_bounded_and_wait_for_a_release(device: CpuDevice) -> None:
    sender = open_sender("pinned", device, sources(), snapshots=2)
    done = device.current_stream().record()
    assert sender.has_free_snapshot
    first, second = await sender.snapshot(done), await sender.snapshot(done)
    assert not sender.has_free_snapshot
    taken = []

    async def take() -> None:
        taken.append(await sender.snapshot(done))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(take)
        await anyio.wait_all_tasks_blocked()
        assert taken == []
        first.release()
        first.release()
    assert len(taken) == 1
    assert not sender.has_free_snapshot
    second.release()
    assert sender.has_free_snapshot
    with pytest.raises(InternalError, match="after its release"):
        second.gather(PIECES[0], Place(device.allocate(64, "pinned"), 0))


async def test_a_cancelled_snapshot_gives_its_memory_back(device: CpuDevice) -> None:
    live = sources()
    sender, done = open_sender("pinned", device, live, snapshots=1), device.current_stream().record()
    for _ in range(3):
        with anyio.CancelScope() as scope:
            scope.cancel()
            await sender.snapshot(done)
    assert sender.has_free_snapshot
    live["s0"].add_(5)
    source = await sender.snapshot(done)
    slot = await sender.open_slots(LARGEST).acquire()
    await source.gather(PIECES[0], slot.place).wait()
    assert torch.equal(slot.buffer.tensor.view(torch.bfloat16).float(), torch.arange(8.0) + 5)


async def test_a_gather_nobody_waited_for_finishes_before_its_snapshot_is_overwritten(
    device: CpuDevice,
) -> None:
    live = sources()
    sender, done = open_sender("pinned", device, live, snapshots=1), device.current_stream().record()
    source = await sender.snapshot(done)
    slot = await sender.open_slots(LARGEST).acquire()
    source.gather(PIECES[0], slot.place)
    source.release()
    live["s0"].fill_(-1)
    await sender.snapshot(done)
    assert torch.equal(slot.buffer.tensor.view(torch.bfloat16).float(), torch.arange(8.0))


async def test_gather_slots_are_bounded_and_given_back_once(device: CpuDevice) -> None:
    sender = open_sender("direct", device, sources()).open_slots(LARGEST)
    first, second = await sender.acquire(), await sender.acquire()
    assert first is not second
    with anyio.CancelScope() as scope:
        scope.cancel()
        await sender.acquire()
    sender.release(first)
    assert await sender.acquire() is first
    sender.release(first)
    with pytest.raises(InternalError, match="released twice"):
        sender.release(first)


async def test_a_foreign_piece_is_refused(device: CpuDevice) -> None:
    sender = open_sender("direct", device, sources())
    source = await sender.snapshot(device.current_stream().record())
    stranger = Piece(writer=TRAINER, offset=0, nbytes=16, transfers=())
    with pytest.raises(InternalError, match="not built for"):
        source.gather(stranger, Place(device.allocate(64, "pinned"), 0))


@pytest.mark.parametrize("receiver_kind", RECEIVERS, ids=["direct", "pinned"])
async def test_an_abandoned_slot_keeps_its_memory_and_gets_new(device: CpuDevice, receiver_kind) -> None:
    written = targets()
    receiver = receiver_kind(device, written, (GROUP,), num_slots=2)
    late = receiver.slot_view(0, 0, 32)
    await receiver.scatter(GROUP, 0).wait()
    receiver.replace(0)
    late[:] = b"\xff" * 32
    assert receiver.abandoned_nbytes == 32
    assert bytes(receiver.slot_view(0, 0, 32)) == bytes(32)
    receiver.slot_view(0, 0, 32)[:] = torch.ones(16, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    await receiver.scatter(GROUP, 0).wait()
    assert all(bool((target == 1).all()) for target in written.values())


@pytest.mark.parametrize("receiver_kind", RECEIVERS, ids=["direct", "pinned"])
async def test_no_memory_that_was_shown_to_writers_is_forgotten(device: CpuDevice, receiver_kind) -> None:
    """It would stay registered for good."""
    receiver = receiver_kind(device, targets(), (GROUP,), num_slots=1)
    shown = list(receiver.buffers)
    for _ in range(2):
        receiver.replace(0)
        shown += receiver.buffers
    assert len(receiver.buffers) == 3
    assert all(any(buffer is known for known in receiver.buffers) for buffer in shown)


async def test_scatter_waits_for_the_callers_stream(device: CpuDevice) -> None:
    written = targets()
    receiver = DirectReceiver(device, written, (GROUP,), num_slots=1, takes_parked=True)
    caller = device.open_stream("caller")
    caller.submit(lambda: [target.fill_(9) for target in written.values()] and None)
    await receiver.scatter(GROUP, 0, after=caller.record()).wait()
    assert all(not target.any() for target in written.values())


def test_the_receivers_differ_in_when_a_version_is_taken() -> None:
    device = CpuDevice()
    direct = DirectReceiver(device, targets(), (GROUP,), num_slots=3, takes_parked=True)
    pinned = PinnedReceiver(device, targets(), (GROUP,), num_slots=3)
    assert (direct.takes_parked, pinned.takes_parked) == (True, False)
    assert [direct.groups_before_hold(n) for n in (0, 2, 5)] == [0, 0, 0]
    early = DirectReceiver(device, targets(), (GROUP,), num_slots=1, takes_parked=False)
    assert (early.takes_parked, early.groups_before_hold(1)) == (False, 1)
    assert [pinned.groups_before_hold(n) for n in (0, 2, 5)] == [0, 2, 3]
    assert (direct.num_slots, direct.slot_nbytes) == (3, 32)
    with pytest.raises(InternalError, match="not in a slot"):
        direct.slot_view(0, 16, 32)
    device.close()


def test_gathers_into_a_devices_memory_are_compiled_where_it_is_adopted() -> None:
    """In a worker thread: the loop that starts them has leases to renew."""
    device = FarDevice()
    there = device.allocate(4096, "device", shared=True)
    assert there.descriptor is not None
    sender = PinnedSender(device, sources(), PIECES, local_slots=1, snapshot_versions=2)
    assert not any(version._by_device for version in sender._versions)
    sender.adopt(ExportedMemory(os.dup(there.descriptor), 4096))
    assert all(version._by_device for version in sender._versions)
    device.close()


def test_a_worker_without_pieces_or_groups_needs_no_memory() -> None:
    device = CpuDevice()
    DirectSender(device, sources(), (), local_slots=2)
    PinnedSender(device, sources(), (), local_slots=2, snapshot_versions=2)
    assert DirectReceiver(device, targets(), (), num_slots=0, takes_parked=True).slot_nbytes == 0
    device.close()


def test_checksum_is_xxh3_and_sees_one_bit() -> None:
    data = bytearray(range(256)) * 64
    assert checksum(memoryview(data)) == xxhash.xxh3_64_intdigest(bytes(data)) > 2**32
    before = checksum(memoryview(data))
    data[1000] ^= 1
    assert checksum(memoryview(data)) != before


def test_no_checksum_is_taken_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xxhash, "xxh3_64_intdigest", lambda data: 0)
    assert checksum(memoryview(b"some bytes")) == 1  # 0 in `Arrived` means none
