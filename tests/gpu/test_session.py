"""Whole jobs in one process with parameters on a GPU: discovery, plan, copies and casts, in every mode."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.accelerator import Accelerator
from tests.unit.session.job import MODES, PATIENCE_S, running, toys

pytestmark = [pytest.mark.gpu, pytest.mark.anyio]

ENGINES = {"engine-0": 2, "engine-1": 1}
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("places", ["gpu to gpu", "gpu to host", "host to gpu"])
@pytest.mark.parametrize("transport", ["loopback", "shared_memory"])
@pytest.mark.parametrize("mode", MODES)
async def test_whole_versions_arrive(
    mode: str, transport: str, places: str, accelerator: Accelerator, tmp_path: Path
) -> None:
    trainer, _, rollout = places.partition(" to ")
    where = {"gpu": accelerator.name, "host": "cpu"}
    jobs = toys(2, ENGINES, trainer_device=where[trainer], rollout_device=where[rollout])
    async with running(tmp_path, mode, engines=ENGINES, toys_of=jobs, transport=transport) as job:
        for version in (1, 2, 3):
            deliveries, _ = await job.update(version)
            assert job.holds(version)
            assert set((await deliveries[0].applied()).values()) == {"applied"}


@pytest.mark.parametrize("dtypes", [(BF16, FP32), (FP32, BF16)], ids=["widened", "narrowed"])
@pytest.mark.parametrize("mode", MODES)
async def test_dtypes_are_cast_on_the_way(
    mode: str, dtypes: tuple[torch.dtype, torch.dtype], accelerator: Accelerator, tmp_path: Path
) -> None:
    jobs = toys(2, ENGINES, *dtypes, trainer_device=accelerator.name, rollout_device=accelerator.name)
    async with running(tmp_path, mode, engines=ENGINES, toys_of=jobs) as job:
        for version in (1, 2):
            await job.update(version)
            assert all(rollout.holds(version, dtypes[0]) for rollout in job.rollouts)


@pytest.mark.parametrize("mode", MODES)
async def test_a_version_passes_through_one_slot(mode: str, accelerator: Accelerator, tmp_path: Path) -> None:
    """Each slot is scattered before it is written again."""
    jobs = toys(2, ENGINES, trainer_device=accelerator.name, rollout_device=accelerator.name)
    async with running(
        tmp_path,
        mode,
        engines=ENGINES,
        toys_of=jobs,
        num_slots=1,
        slot_nbytes=1024,
        transport="shared_memory",
    ) as job:
        for version in (1, 2, 3):
            await job.update(version)
            assert job.holds(version)


async def test_one_job_goes_through_all_modes(accelerator: Accelerator, tmp_path: Path) -> None:
    """Each change ends the streams and buffers of the epoch before."""
    jobs = toys(1, {"engine-0": 1}, trainer_device=accelerator.name, rollout_device=accelerator.name)
    values = {"connect_timeout_s": PATIENCE_S, "transport": "shared_memory"}
    async with running(
        tmp_path,
        "sync",
        engines={"engine-0": 1},
        toys_of=jobs,
        receiver_config=values,
        transport="shared_memory",
    ) as job:
        for version, mode in enumerate(("async", "sender_overlap", "receiver_overlap", "sync"), start=1):
            await job.senders[0].reconfigure(mode=mode)
            await job.update(version)
            assert job.holds(version)


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_a_single_wrong_element_is_found(mode: str, accelerator: Accelerator, tmp_path: Path) -> None:
    """Digests are taken where the weights are."""
    jobs = toys(1, {"engine-0": 1}, trainer_device=accelerator.name, rollout_device=accelerator.name)
    async with running(tmp_path, mode, engines={"engine-0": 1}, toys_of=jobs) as job:
        await job.update(1)
        assert (await job.senders[0].verify()).equal
        job.rollouts[0].parameters["down"][1, 2] += 1
        assert not (await job.senders[0].verify()).equal
