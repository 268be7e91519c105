"""`verify()`: what engines hold is compared with what trainers have, between any layouts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest
import torch

import wbridge
from tests.unit.session.job import (
    MODES,
    Job,
    gather,
    rendezvous,
    running,
    running_sync,
    settings,
    together,
    toys,
)
from wbridge.errors import BarrierTimeout, PeerLost, UpdateAborted
from wbridge.session.publication import Publication

pytestmark = pytest.mark.anyio


async def verify(job: Job) -> wbridge.Verification:
    results = await gather(*[sender.verify for sender in job.senders])
    assert all(result == results[0] for result in results)
    return results[0]


def outcomes(result: wbridge.Verification) -> dict[str, str]:
    return {engine.engine: engine.outcome for engine in result.engines}


@pytest.mark.parametrize("mode", MODES)
async def test_engines_of_any_layout_are_found_equal(mode: str, tmp_path: Path) -> None:
    async with running(tmp_path, mode) as job:
        await job.update(7)
        result = await verify(job)
        assert result.equal and result.version == 7
        assert [(e.engine, e.version, e.different) for e in result.engines] == [
            ("engine-0", 7, ()),
            ("engine-1", 7, ()),
        ]


HALVES = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), HALVES, HALVES[::-1]]
)
async def test_a_cast_on_the_way_is_no_difference(
    dtypes: tuple[torch.dtype, torch.dtype], tmp_path: Path
) -> None:
    async with running(tmp_path, toys_of=toys(2, {"engine-0": 2}, *dtypes), engines={"engine-0": 2}) as job:
        await job.update(1)
        assert (await verify(job)).equal


async def test_a_changed_element_is_named_with_its_worker(tmp_path: Path) -> None:
    async with running(tmp_path) as job:
        await job.update(1)
        job.rollouts[1].parameters["qkv"][3, 4] += 1.0
        result = await verify(job)
        assert outcomes(result) == {"engine-0": "different", "engine-1": "equal"} and not result.equal
        worker = job.rollouts[1].target.worker
        assert result.engines[0].different == (wbridge.Difference(worker, "q.weight"),)


async def test_elements_that_changed_places_are_found(tmp_path: Path) -> None:
    async with running(tmp_path, num_trainers=1, engines={"engine-0": 1}) as job:
        await job.update(1)
        embed = job.rollouts[0].parameters["embed"]
        embed[[0, 1]] = embed[[1, 0]].clone()
        (engine,) = (await verify(job)).engines
        assert [d.tensor for d in engine.different] == ["embed.weight"]


async def test_an_engine_at_another_version_is_reported_with_it(tmp_path: Path) -> None:
    async with running(tmp_path, "async", engines={"engine-0": 1, "engine-1": 1}) as job:
        await job.update(1)
        await gather(lambda: job.send(2), lambda: job.take(0))
        result = await verify(job)
        assert outcomes(result) == {"engine-0": "equal", "engine-1": "other_version"}
        assert result.engines[1].version == 1 and "version 1" in result.engines[1].reason


async def test_a_version_that_only_some_engines_took_in_time_is_what_they_are_compared_with(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, "async", num_trainers=1) as job:
        await job.update(1)
        epoch = job.senders[0]._trainer._epoch
        assert epoch is not None
        send = epoch.send

        async def late(*args: Any) -> Publication:  # Any: as `send` takes them
            publication: Publication = await send(*args)
            await asyncio.wrap_future(publication._landed)
            raise BarrierTimeout("engine-1 did not take it", ["engine-1"])

        epoch.send = late  # type: ignore[method-assign]  # engines need not be slow for it
        job.trainers[0].set_version(2)
        with pytest.raises(BarrierTimeout):
            await job.senders[0].send_weights(2)
        await job.take(*job.of("engine-0"))
        result = await verify(job)
        assert result.version == 2
        assert outcomes(result) == {"engine-0": "equal", "engine-1": "other_version"}


async def test_a_commit_waits_for_the_digest(tmp_path: Path) -> None:
    """Polls go on while engines are read; none of them is torn, so each is found whole at some version."""
    async with running(tmp_path, "async", num_trainers=1, engines={"engine-0": 2}) as job:
        await job.update(1)
        for version in range(2, 8):
            await job.send(version)
            result, _ = await gather(lambda: verify(job), lambda: job.take())
            assert outcomes(result)["engine-0"] in ("equal", "other_version")
        assert (await verify(job)).equal


async def test_opaque_tensors_are_not_called_equal(tmp_path: Path) -> None:
    def retarget(index: int, target: wbridge.Target) -> wbridge.Target:
        norm = target.parameters["norm"]

        def load(tensors: object) -> None:
            for name, tensor in tensors:  # type: ignore[attr-defined]  # pairs
                if name == "norm.weight":
                    norm.copy_(tensor * 2 + 1)
                else:
                    job_rollouts[index].load_weights([(name, tensor)])

        return msgspec.structs.replace(target, load_weights=load)

    trainers, job_rollouts = toys(1, {"engine-0": 1})
    async with running(
        tmp_path, engines={"engine-0": 1}, toys_of=(trainers, job_rollouts), retarget=retarget
    ) as job:
        await job.update(1)
        (engine,) = (await verify(job)).engines
        assert engine.outcome == "unverifiable" and engine.different == ()
        assert [u.tensor for u in engine.unverifiable] == ["norm.weight"]
        assert "norm" in engine.unverifiable[0].reason


async def test_a_dead_engine_is_lost_and_keeps_nobody_waiting(tmp_path: Path) -> None:
    async with running(tmp_path, "async") as job:
        await job.update(1)
        await job.receivers[2].aclose()
        result = await verify(job)
        assert outcomes(result).get("engine-1", "lost") == "lost" and outcomes(result)["engine-0"] == "equal"


async def test_a_rank_that_does_not_call_is_named(tmp_path: Path) -> None:
    async with running(tmp_path, update_timeout_s=0.2) as job:
        await job.update(1)
        with pytest.raises(BarrierTimeout, match=r"trainer/trainer\[1\].*every trainer rank") as error:
            await job.senders[0].verify()
        assert error.value.missing == ("trainer/trainer[1]",)
        assert (await verify(job)).equal


async def test_an_engine_that_does_not_answer_is_named(tmp_path: Path) -> None:
    """A digest waits for the end of an apply, which does not come here."""
    async with running(
        tmp_path, "async", num_trainers=1, engines={"engine-0": 1}, update_timeout_s=0.2
    ) as job:
        await job.update(1)
        gate = job.receivers[0]._rollout.gate
        assert gate.try_close() is None
        with pytest.raises(BarrierTimeout, match=r"rollout/engine-0\[0\] did not send its digests"):
            await job.senders[0].verify()
        gate.open()
        assert (await verify(job)).equal


async def test_a_cancelled_call_leaves_the_next_one_whole(tmp_path: Path) -> None:
    """What was taken back is not paired with the request of the other rank, which comes first next time."""
    async with running(tmp_path) as job:
        await job.update(1)
        verifying = job.senders[0]._trainer._epoch.verifier  # type: ignore[union-attr]  # an epoch is live

        async def stop(scope: anyio.CancelScope) -> None:
            while not verifying._answers:
                await anyio.sleep(0.001)
            scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stop, tasks.cancel_scope)
            await job.senders[0].verify()
        results: list[wbridge.Verification] = []

        async def ask(index: int) -> None:
            results.append(await job.senders[index].verify())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, 1)
            while not job.senders[1]._trainer._epoch.verifier._answers:  # type: ignore[union-attr]  # as above
                await anyio.sleep(0.001)
            await ask(0)
        assert len(results) == 2 and all(result.equal for result in results)


async def test_a_rank_that_leaves_ends_the_round(tmp_path: Path) -> None:
    async with running(tmp_path) as job:
        await job.update(1)

        async def fails() -> None:
            with pytest.raises(PeerLost):
                await job.senders[0].verify()

        async def leave() -> None:
            await job.senders[1].aclose()

        await gather(fails, leave)


async def test_a_digest_that_its_epoch_does_not_wait_for_is_given_up(tmp_path: Path) -> None:
    trainers, rollouts = toys(1, {"engine-0": 1, "engine-1": 1})
    toys_of = (trainers, rollouts[:1])
    async with running(tmp_path, "async", toys_of=toys_of, engines={"engine-0": 1}) as job:
        await job.update(1)
        gate = job.receivers[0]._rollout.gate
        assert gate.try_close() is None
        late = wbridge.ReceiverAdapter(
            rollouts[1].target, rendezvous=rendezvous(tmp_path), config=settings("async", 1)
        )

        async def ask() -> None:
            with pytest.raises(UpdateAborted, match="verify again"):
                await job.senders[0].verify()

        async def change() -> None:
            while not gate._waiting:
                await anyio.sleep(0.001)
            await late.connect()

        async with late:
            await gather(ask, change)
            gate.open()
            job.receivers.append(late)
            job.rollouts.append(rollouts[1])
            await job.update(2)
            assert (await verify(job)).equal


async def test_nothing_is_digested_for_an_epoch_that_is_over(tmp_path: Path) -> None:
    async with running(tmp_path, num_trainers=1, engines={"engine-0": 1}) as job:
        for worker in (job.senders[0]._trainer._worker, job.receivers[0]._rollout._worker):
            holdings = worker._holdings
            assert holdings is not None
            holdings.end()
            with pytest.raises(UpdateAborted, match=r"epoch has ended.*call again"):
                await holdings.digest_incoming()


def test_the_blocking_twin(tmp_path: Path) -> None:
    with running_sync(tmp_path) as job:
        job.update(3)
        results = together(*[sender.verify for sender in job.senders])
        assert all(result.equal and result.version == 3 for result in results)
