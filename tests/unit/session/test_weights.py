"""What is moved: opaque loaders, mixed dtypes, frozen and unfed tensors, any number of workers."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest
import torch

import wbridge
from tests.models.toy import Rollout, weights
from tests.unit.session.job import MODES, PATIENCE_S, gather, rendezvous, running, settings, toys
from wbridge.ids import WorkerId
from wbridge.layout.source_map import TensorSpec

pytestmark = pytest.mark.anyio
ONE = {"engine-0": 1}


class Scaling(Rollout):
    """A loader that computes: nothing can be written into its parameters directly."""

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            super().load_weights([(name, tensor * 2)])

    def holds(self, version: int) -> bool:
        twin = Rollout(self.engine, self.rank, self.size)
        twin.load_weights([(name, tensor * 2) for name, tensor in weights(version).items()])
        return all(torch.equal(tensor, self.parameters[name]) for name, tensor in twin.parameters.items())


@pytest.mark.parametrize("mode", MODES)
async def test_a_loader_that_computes_gets_whole_tensors_on_the_receiver(mode: str, tmp_path: Path) -> None:
    trainers, _ = toys(2, {})
    rollouts: list[Rollout] = [Scaling("engine-0", rank, 2) for rank in range(2)]
    async with running(tmp_path, mode, engines=ONE, toys_of=(trainers, rollouts)) as job:
        for version in (1, 2, 3):
            await job.update(version)
            assert job.holds(version)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("trainer", "rollout"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
async def test_c19_c26_each_pair_of_dtypes_is_cast_once(
    mode: str, trainer: torch.dtype, rollout: torch.dtype, tmp_path: Path
) -> None:
    toy = toys(2, {"engine-0": 2}, trainer, rollout)
    async with running(tmp_path, mode, engines=ONE, toys_of=toy) as job:
        for version in (1, 2):
            await job.update(version)
            expected = {name: tensor.to(trainer) for name, tensor in weights(version).items()}
            for toy_rollout in job.rollouts:
                twin = Rollout("engine-0", toy_rollout.rank, 2, rollout)
                twin.load_weights(expected.items())
                for name, tensor in twin.parameters.items():
                    assert torch.equal(tensor, toy_rollout.parameters[name]), name


async def test_c29_frozen_tensors_are_left_alone_and_cost_nothing(tmp_path: Path) -> None:
    patterns = ("q.weight", "k.weight", "v.weight", "*norm*")
    async with running(tmp_path, "sync", engines=ONE, include=patterns) as job:
        for rollout in job.rollouts:
            rollout.load_weights(weights(7).items())
        await job.update(1)
        for rollout in job.rollouts:
            new, old = rollout.expected(1), rollout.expected(7)
            for name in ("qkv", "norm"):
                assert torch.equal(rollout.parameters[name], new[name])
            for name in ("embed", "gate_up", "down", "scale"):
                assert torch.equal(rollout.parameters[name], old[name])
        sent = sum(sender.counters["put_nbytes"] for sender in job.senders)
        needed = sum(4 * job.rollouts[0].parameters[name].numel() for name in ("qkv", "norm"))
        assert needed <= sent <= 1.01 * needed


async def test_a_parameter_declared_unfed_keeps_its_values(tmp_path: Path) -> None:
    def retarget(_: int, target: wbridge.Target) -> wbridge.Target:
        return msgspec.structs.replace(target, parameters={**target.parameters, "rope.cache": rope})

    rope = torch.arange(6.0)
    async with running(tmp_path, "async", engines=ONE, retarget=retarget, allow_unfed=("rope.*",)) as job:
        await job.update(1)
        assert job.holds(1)
        assert torch.equal(rope, torch.arange(6.0))


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_c64_data_parallel_engines_are_told_apart_by_name_not_by_arithmetic(
    mode: str, tmp_path: Path
) -> None:
    """Two engines of two ranks, each with ranks 0 and 1 of its own."""
    async with running(tmp_path, mode, engines={"dp-0": 2, "dp-1": 2}) as job:
        for version in (1, 2):
            deliveries, _ = await job.update(version)
            assert await deliveries[1].applied() == {"dp-0": "applied", "dp-1": "applied"}
            assert job.holds(version)
        assert not torch.equal(job.rollouts[0].parameters["qkv"], job.rollouts[1].parameters["qkv"])
        assert torch.equal(job.rollouts[0].parameters["qkv"], job.rollouts[2].parameters["qkv"])


@pytest.mark.parametrize(("num_trainers", "num_engines"), [(5, 2), (2, 5)])
async def test_c71_any_number_of_trainers_serves_any_number_of_engines(
    num_trainers: int, num_engines: int, tmp_path: Path
) -> None:
    engines = {f"engine-{i}": 1 for i in range(num_engines)}
    async with running(tmp_path, "async", num_trainers=num_trainers, engines=engines) as job:
        for version in (1, 2):
            deliveries, _ = await job.update(version)
            assert set((await deliveries[-1].applied()).values()) == {"applied"}
            assert job.holds(version)


async def test_c66_the_geometry_is_the_coordinators(tmp_path: Path) -> None:
    """The rollout sets no slot size; it takes the job's, not a default or guess of its own."""
    (trainer,), (rollout,) = toys(1, ONE)
    url = rendezvous(tmp_path)
    plain: dict[str, object] = {"transport": "loopback", "connect_timeout_s": PATIENCE_S}
    sender = wbridge.SenderAdapter(
        trainer.source, rendezvous=url, config=plain | {"slot_nbytes": 1024, "mode": "async"}
    )
    receiver = wbridge.ReceiverAdapter(rollout.target, rendezvous=url, config=plain)
    async with sender, receiver:
        await gather(sender.connect, receiver.connect)
        assert receiver._rollout._engine._context.staging.slot_nbytes <= 1024
        trainer.set_version(1)
        await sender.send_weights(1)
        update = await receiver.poll_requests(wait_s=PATIENCE_S)
        assert update is not None
        assert rollout.holds(1)
        assert sender.counters["puts"] > 4


async def test_c22_empty_shards_and_scalars_travel(tmp_path: Path) -> None:
    """More trainers than rows."""
    checkpoint = {"w": TensorSpec((3, 2), "float32"), "s": TensorSpec((), "float32")}
    shards = [torch.zeros(1 if rank < 3 else 0, 2) for rank in range(4)]
    scalars = [torch.zeros(()) for _ in range(4)]

    def source(rank: int) -> wbridge.Source:
        def load(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
            for name, tensor in tensors:
                if name == "s":
                    scalars[rank].copy_(tensor)
                else:
                    shards[rank].copy_(tensor[rank : rank + 1] if rank < 3 else tensor[3:])

        return wbridge.Source(
            worker=WorkerId("trainer", "trainer", (4,), (rank,)),
            checkpoint=checkpoint,
            parameters={"w": shards[rank], "s": scalars[rank]},
            load_weights=load,
        )

    w, s = torch.zeros(3, 2), torch.zeros(())

    def load_rollout(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            {"w": w, "s": s}[name].copy_(tensor)

    target = wbridge.Target(
        worker=WorkerId("rollout", "engine-0", (1,), (0,)),
        checkpoint=checkpoint,
        parameters={"w": w, "s": s},
        load_weights=load_rollout,
    )
    values = settings("sync", 1)
    senders = [
        wbridge.SenderAdapter(source(rank), rendezvous=rendezvous(tmp_path), config=values)
        for rank in range(4)
    ]
    receiver = wbridge.ReceiverAdapter(target, rendezvous=rendezvous(tmp_path), config=values)
    async with AsyncExitStack() as stack:
        for adapter in (*senders, receiver):
            await stack.enter_async_context(adapter)
        await gather(*[adapter.connect for adapter in (*senders, receiver)])
        for rank in range(3):
            shards[rank].fill_(rank + 1.0)
        for scalar in scalars:
            scalar.fill_(9.0)
        sends = [lambda x=x: x.send_weights(1) for x in senders]
        await gather(*sends, lambda: receiver.poll_requests(wait_s=PATIENCE_S))
        assert w.tolist() == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
        assert float(s) == 9.0
