"""A whole job over UCX, native on both sides: no byte of a large piece passes through Python."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import anyio
import pytest
import torch

import wbridge
from tests.unit.session.job import MODES, rendezvous
from wbridge.native.ucx import why_missing

pytestmark = pytest.mark.anyio

SHAPE = (64, 1024)
NAMES = [f"layer-{index}" for index in range(4)]


class Side:
    def __init__(self, worker: wbridge.WorkerId) -> None:
        self.worker = worker
        self.parameters = {name: torch.zeros(SHAPE) for name in NAMES}

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            self.parameters[name].copy_(weight)

    @property
    def described(self) -> dict[str, object]:
        checkpoint = {name: wbridge.TensorSpec(SHAPE, "float32") for name in NAMES}
        return {
            "worker": self.worker,
            "checkpoint": checkpoint,
            "parameters": self.parameters,
            "load_weights": self.load,
        }


@pytest.mark.parametrize("mode", MODES)
async def test_large_pieces_are_put_into_the_slots_of_the_receiver(mode: str, tmp_path: Path) -> None:
    if (why := why_missing()) is not None:
        pytest.skip(why)
    trainer = Side(wbridge.WorkerId("trainer", "trainer", (1,), (0,)))
    rollout = Side(wbridge.WorkerId("rollout", "engine-0", (1,), (0,)))
    url, config = rendezvous(tmp_path), {"transport": "ucxx", "mode": mode, "num_engines": 1}
    async with (
        wbridge.SenderAdapter(wbridge.Source(**trainer.described), rendezvous=url, config=config) as sender,
        wbridge.ReceiverAdapter(
            wbridge.Target(**rollout.described), rendezvous=url, config=config
        ) as receiver,
    ):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sender.connect)
            tasks.start_soon(receiver.connect)
        for version in (1, 2, 3):
            for parameter in trainer.parameters.values():
                parameter.fill_(version)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(sender.send_weights, version)
                update = await receiver.poll_requests(wait_s=10)
            assert update is not None and update.version == version
            assert all(bool((p == version).all()) for p in rollout.parameters.values())
        nbytes = 3 * sum(parameter.nbytes for parameter in rollout.parameters.values())
        assert sender.counters["put_nbytes"] == sender.counters["one_sided_nbytes"] == nbytes
