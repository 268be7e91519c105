"""An engine gives the memory of its weights away and gets it back: sleep modes, reloads."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import anyio
import msgspec
import pytest
import torch

import wbridge
from tests.unit.session.job import ENGINES, MODES, gather, running, toys
from wbridge.errors import ConfigError, EndpointClosed, LayoutError, ProtocolError, UpdateAborted

pytestmark = pytest.mark.anyio


def replace(parameters: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Other memory, with other values; the old is kept, so that no allocation reuses it."""
    old = list(parameters.values())
    parameters.update({name: torch.full_like(tensor, -9.0) for name, tensor in parameters.items()})
    return old


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("transport", ["loopback", "shared_memory"])
async def test_replaced_parameters_are_written_after_it(mode: str, transport: str, tmp_path: Path) -> None:
    async with running(tmp_path, mode, transport=transport) as job:
        await job.update(1)
        old = [replace(job.rollouts[index].parameters) for index in job.of("engine-0")]
        before = [tensor.clone() for tensors in old for tensor in tensors]
        await gather(*[job.receivers[index].rebind for index in job.of("engine-0")])
        for index in job.of("engine-0"):
            assert job.receivers[index].version is None
            with pytest.raises(UpdateAborted, match=r"rebind\(\) was called; poll until a whole version"):
                job.receivers[index].step().__enter__()
        assert job.receivers[2].version == 1
        await job.update(2)
        assert job.holds(2)
        now = [tensor for tensors in old for tensor in tensors]
        assert all(torch.equal(*pair) for pair in zip(now, before, strict=True)), "old memory was written"
        await job.update(3)
        assert job.holds(3)


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_a_version_that_came_while_the_engine_slept_is_applied_to_the_new_memory(
    mode: str, tmp_path: Path
) -> None:
    async with running(tmp_path, mode, delivery="every") as job, anyio.create_task_group() as tasks:
        await job.update(1)
        kept = [replace(rollout.parameters) for rollout in job.rollouts]
        tasks.start_soon(job.send, 2)
        await anyio.sleep(0.05)
        await gather(*[receiver.rebind for receiver in job.receivers])
        await job.take()
        assert job.holds(2)
        assert len(kept) == 3


async def test_the_digest_is_of_the_new_memory(tmp_path: Path) -> None:
    async with running(tmp_path) as job:
        await job.update(1)
        kept = [replace(rollout.parameters) for rollout in job.rollouts]
        await gather(*[receiver.rebind for receiver in job.receivers])
        await job.update(2)
        assert len(await gather(*[sender.verify for sender in job.senders])) == 2
        assert len(kept) == 3


async def test_parameters_of_another_layout_are_refused_by_name(tmp_path: Path) -> None:
    async with running(tmp_path) as job:
        await job.update(1)
        parameters, before = job.rollouts[2].parameters, job.rollouts[2].parameters["down"]
        parameters["down"] = torch.zeros(before.shape, dtype=torch.bfloat16)
        with pytest.raises(LayoutError, match=r"1 of 6 .* down: dtype torch.float32 became torch.bfloat16"):
            await job.receivers[2].rebind()
        assert job.receivers[2].version is None
        parameters["down"] = before
        await job.update(2)
        assert job.holds(2)


async def test_parameters_that_trainers_write_directly_may_not_move(tmp_path: Path) -> None:
    jobs = toys(2, ENGINES)
    for rollout in jobs[1]:
        wbridge.share_memory(rollout.parameters.values())
    async with running(tmp_path, "sync", toys_of=jobs, transport="shared_memory") as job:
        await job.update(1)
        await job.receivers[2].rebind()  # where they were
        assert job.receivers[2].version is None
        await job.update(2)
        assert job.holds(2)
        old = dict(job.rollouts[2].parameters)
        kept = replace(job.rollouts[2].parameters)
        with pytest.raises(ConfigError, match="6 parameters, down first, have moved"):
            await job.receivers[2].rebind()
        job.rollouts[2].parameters.update(old)
        await job.update(3)
        assert job.holds(3)
        assert kept


async def test_it_is_called_between_steps_of_a_connected_adapter(tmp_path: Path) -> None:
    trainers, rollouts = toys(1, {"engine-0": 1})
    receiver = wbridge.ReceiverAdapter(rollouts[0].target, rendezvous=f"file://{tmp_path / 'nowhere'}")
    with pytest.raises(EndpointClosed, match=r"connect\(\) before rebind\(\)"):
        await receiver.rebind()
    assert trainers
    async with running(tmp_path, num_trainers=1, engines={"engine-0": 1}) as job:
        with job.receivers[0].step(), pytest.raises(ProtocolError, match="between steps"):
            await job.receivers[0].rebind()


@pytest.mark.parametrize("mode", MODES)
async def test_c40_all_that_a_sleeping_engine_lost_is_restored_with_buffers_and_what_is_derived(
    mode: str, tmp_path: Path
) -> None:
    buffers: dict[str, torch.Tensor] = {}
    derived = torch.zeros(16)

    def with_buffers(_: int, target: wbridge.Target) -> wbridge.Target:
        parameters = target.parameters
        buffers["norm"] = parameters["norm"]
        rest = {name: tensor for name, tensor in parameters.items() if name != "norm"}

        def load_weights(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
            assert target.load_weights is not None
            target.load_weights(tensors)

        def derive() -> None:
            derived.copy_(buffers["norm"] * 2)

        return msgspec.structs.replace(
            target, parameters=rest, buffers=buffers, load_weights=load_weights, after_apply=derive
        )

    async with running(tmp_path, mode, engines={"engine-0": 1}, retarget=with_buffers) as job:
        await job.update(1)
        assert job.holds(1)
        for tensor in (*job.rollouts[0].parameters.values(), *buffers.values(), derived):
            tensor.fill_(float("nan"))  # as memory that was given away and came back where it was
        await job.receivers[0].rebind()
        assert job.receivers[0].version is None
        await job.update(2)
        assert job.holds(2)
        assert derived.equal(job.rollouts[0].expected(2)["norm"] * 2)
