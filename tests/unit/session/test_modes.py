"""All four modes move whole versions bit for bit, through the same path."""

from __future__ import annotations

import threading
from pathlib import Path

import anyio
import msgspec
import pytest
import torch

import wbridge
from tests.models.toy import SHAPES
from tests.unit.session.job import MODES, PATIENCE_S, running, running_sync
from wbridge.device.cpu import CpuDevice
from wbridge.engine.context import WorkerContext

pytestmark = pytest.mark.anyio
CHECKPOINT_NBYTES = 4 * sum(torch.Size(shape).numel() for shape in SHAPES.values())
REPLICATED = ("embed.weight", "norm.weight", "scale")


def needed_nbytes(tensor_parallel: int) -> int:
    """What the ranks of one engine hold together, every copy counted."""
    replicated = 4 * sum(torch.Size(SHAPES[name]).numel() for name in REPLICATED)
    return CHECKPOINT_NBYTES + (tensor_parallel - 1) * replicated


@pytest.mark.parametrize("mode", MODES)
async def test_three_versions_arrive_bit_for_bit_in_every_mode(mode: str, tmp_path: Path) -> None:
    async with running(tmp_path, mode) as job:
        assert [receiver.version for receiver in job.receivers] == [None] * 3
        for version in (1, 2, 3):
            deliveries, updates = await job.update(version, {"step": version, "lr": 0.5})

            assert job.holds(version)
            assert [receiver.version for receiver in job.receivers] == [version] * 3
            assert [update.version for update in updates] == [version] * 3
            assert [update.metadata for update in updates] == [{"step": version, "lr": 0.5}] * 3
            assert {update.ticket for update in updates} == {version} == {d.ticket for d in deliveries}
            assert {update.epoch for update in updates} == {job.senders[0].epoch} == {job.receivers[2].epoch}
            for update in updates:
                assert update.stats.stall_s >= update.stats.apply_s > 0
            for delivery in deliveries:
                assert await delivery.applied() == {"engine-0": "applied", "engine-1": "applied"}
                assert await delivery.landed() == delivery.outcomes
        for sender in job.senders:
            assert sender.last_send is not None and sender.last_send.stall_s > 0


@pytest.mark.parametrize("mode", MODES)
def test_three_versions_arrive_bit_for_bit_with_the_blocking_adapters(mode: str, tmp_path: Path) -> None:
    with running_sync(tmp_path, mode) as job:
        for version in (1, 2, 3):
            deliveries, updates = job.update(version, {"step": version})

            assert job.holds(version)
            assert [receiver.version for receiver in job.receivers] == [version] * 3
            assert [(u.version, u.metadata) for u in updates] == [(version, {"step": version})] * 3
            for delivery in deliveries:
                assert delivery.applied() == {"engine-0": "applied", "engine-1": "applied"}
                assert delivery.landed() == delivery.outcomes
                assert (delivery.version, delivery.ticket) == (version, version)


@pytest.mark.parametrize("mode", MODES)
async def test_egress_is_what_the_rollouts_need_counted_by_the_transport(mode: str, tmp_path: Path) -> None:
    async with running(tmp_path, mode) as job:
        before = sum(sender.counters["put_nbytes"] for sender in job.senders)
        await job.update(1)
        deliveries, _ = await job.update(2)
        await deliveries[0].applied()

        sent = sum(sender.counters["put_nbytes"] for sender in job.senders) - before
        needed = 2 * (needed_nbytes(2) + needed_nbytes(1))
        assert 1.00 <= sent / needed <= 1.01


def contexts(job: object) -> tuple[list[WorkerContext], list[WorkerContext]]:
    senders = [sender._trainer._epoch.context for sender in job.senders]  # type: ignore[attr-defined]
    receivers = [receiver._rollout._engine._context for receiver in job.receivers]  # type: ignore[attr-defined]
    return senders, receivers


async def test_the_modes_differ_only_in_the_two_staging_objects(tmp_path: Path) -> None:
    kinds: set[tuple[type, type]] = set()
    rest: list[object] = []
    for mode in MODES:
        async with running(tmp_path, mode) as job:
            senders, receivers = contexts(job)
            plain: list[object] = []
            for context in (*senders, *receivers):
                fields = set(context.__struct_fields__)
                config = msgspec.to_builtins(context.config)
                assert config.pop("mode") == mode
                kept = fields - {"staging", "gather_slots", "epoch", "transport", "endpoints", "config"}
                plain.append({name: getattr(context, name) for name in kept} | {"config": config})
                plain.append((type(context.transport), sorted(context.endpoints)))
                plain.append(sorted(getattr(context, "gather_slots", ())))
                plain.append([type(endpoint) for _, endpoint in sorted(context.endpoints.items())])
            rest.append(plain)
            (sending,) = {type(context.staging) for context in senders}  # type: ignore[attr-defined]
            (receiving,) = {type(context.staging) for context in receivers}  # type: ignore[attr-defined]
            kinds.add((sending, receiving))
    assert all(plain == rest[0] for plain in rest)
    assert len(kinds) == 4
    assert len({sending for sending, _ in kinds}) == len({receiving for _, receiving in kinds}) == 2


@pytest.mark.parametrize("mode", MODES)
async def test_c47_weights_may_change_as_soon_as_send_returns(mode: str, tmp_path: Path) -> None:
    """On devices as late as a real one may be: any read of the weights after the fence would show."""
    with_device = (CpuDevice(seed=7), CpuDevice(seed=11))
    async with running(tmp_path, mode, devices=with_device) as job:

        async def train_on(index: int, version: int) -> None:
            await job.senders[index].send_weights(version)
            for parameter in job.trainers[index].parameters.values():
                parameter.fill_(-7.0)

        for version in (1, 2, 3):
            for trainer in job.trainers:
                trainer.set_version(version)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(train_on, 0, version)
                tasks.start_soon(train_on, 1, version)
                await job.take()
            assert job.holds(version)
    for device in with_device:
        device.close()


async def test_c47_a_missing_wait_shows(tmp_path: Path) -> None:
    """The proof that the test above can fail: the trainer does not wait for `send_weights`."""
    devices = (CpuDevice(seed=7), CpuDevice(seed=11))
    async with running(tmp_path, "sync", devices=devices) as job:
        for trainer in job.trainers:
            trainer.set_version(1)

        async def send_and_mutate_at_once(index: int) -> None:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(job.senders[index].send_weights, 1)
                await anyio.lowlevel.checkpoint()
                for parameter in job.trainers[index].parameters.values():
                    parameter.fill_(-7.0)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send_and_mutate_at_once, 0)
            tasks.start_soon(send_and_mutate_at_once, 1)
            await job.take()
        assert not job.holds(1)
    for device in devices:
        device.close()


async def test_an_update_needs_nothing_of_the_trainers_loop(tmp_path: Path) -> None:
    """Async mode: the trainer's thread stands still until the receiver has the version."""
    taken = threading.Event()
    async with running(tmp_path, "async", num_trainers=1, engines={"engine-0": 1}) as job:
        receiver = job.receivers[0]

        def roll() -> None:
            async def take() -> None:
                update = await receiver.poll_requests(wait_s=PATIENCE_S)
                if update is not None and job.rollouts[0].holds(1):
                    taken.set()

            anyio.run(take)

        thread = threading.Thread(target=roll)
        thread.start()
        await job.send(1)
        landed_while_blocked = taken.wait(PATIENCE_S)  # blocks this loop on purpose
        thread.join()
        assert landed_while_blocked


async def test_an_update_needs_nothing_of_the_rollouts_loop(tmp_path: Path) -> None:
    """Pinned on both sides: a version lands while the rollout's thread stands still."""
    async with running(tmp_path, "async", num_trainers=1, engines={"engine-0": 1}) as job:
        landed = threading.Event()
        delivery = (await job.send(1))[0]

        def wait() -> None:
            anyio.run(delivery.landed)
            landed.set()

        thread = threading.Thread(target=wait)
        thread.start()
        landed_while_blocked = landed.wait(PATIENCE_S)  # blocks this loop on purpose
        thread.join()
        assert landed_while_blocked
        assert delivery.outcomes == {"engine-0": "landed"}
        assert isinstance((await job.take())[0], wbridge.Update)
        assert await delivery.applied() == {"engine-0": "applied"}
