"""One trainer and one engine of the benchmarks' model, whose bits tell version, tensor and place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

import wbridge
import wbridge.sync
from benchmarks.harness.model import Parameters, rollout_target, shapes, trainer_source
from tests.gpu.accelerator import Accelerator
from tests.unit.session.job import MODES, rendezvous, settings, together
from wbridge.staging.in_place import InPlaceReceiver

NUM_LAYERS = 2
"""64 MB."""
SLOT_NBYTES = 5 * 2**20 + 4096
"""No tensor fits one slot, and the last slot of each is not full."""


def checkpoint_of(version: int, num_layers: int, device: str) -> dict[str, torch.Tensor]:
    found = {}
    for k, (name, shape) in enumerate(shapes(num_layers).items()):
        place = torch.arange(shape[0] * shape[1], dtype=torch.int32, device=device)
        bits = (place * 31 + version * 1009 + k * 17).to(torch.int16)
        found[name] = bits.view(torch.bfloat16).reshape(shape)
    return found


def load(parameters: Parameters, version: int) -> None:
    """Write a version into the parameters of a trainer that holds everything."""
    num_layers, device = len(parameters) // 2, str(next(iter(parameters.values())).device)
    for name, tensor in checkpoint_of(version, num_layers, device).items():
        parameters[name].copy_(tensor)


def is_exactly(parameters: Parameters, version: int) -> bool:
    """Whether an engine of one worker holds the version, bit for bit."""
    num_layers, device = len(parameters) // 2, str(next(iter(parameters.values())).device)
    expected = checkpoint_of(version, num_layers, device)
    return all(
        torch.equal(parameters[name].view(torch.int16), tensor.view(torch.int16))
        for name, tensor in expected.items()
    )


def values(mode: str, num_engines: int = 1, **more: object) -> dict[str, object]:
    """A process that starts may have to compile kernels and to load them."""
    start = {"slot_nbytes": SLOT_NBYTES, "transport": "auto", "connect_timeout_s": 45.0}
    return settings(mode, num_engines, **{**start, **more})


class Pair(NamedTuple):
    """A trainer and an engine that are connected."""

    sender: wbridge.sync.SenderAdapter
    receiver: wbridge.sync.ReceiverAdapter
    weights: Parameters
    parameters: Parameters


WAYS = [
    *[(mode, transport) for mode in MODES for transport in ("loopback", "shared_memory")],
    *[(mode, "in place") for mode in ("sync", "sender_overlap")],
]
"""Modes, and how a version comes to the engine in this process."""


@contextmanager
def pair(
    path: Path, mode: str, accelerator: Accelerator, *, way: str = "loopback", **config: object
) -> Iterator[Pair]:
    """Both in this process; every version goes to the engine. `in place`: straight into its parameters."""
    source, weights = trainer_source(0, 1, NUM_LAYERS, device=accelerator.name)
    target, parameters = rollout_target("engine-0", 0, 1, NUM_LAYERS, device=accelerator.name)
    if way == "in place":
        wbridge.share_memory(parameters.values())
    transport = "shared_memory" if way == "in place" else way
    config = values(mode, delivery="every", transport=transport, **config)
    with (
        wbridge.sync.SenderAdapter(source, rendezvous=rendezvous(path), config=config) as sender,
        wbridge.sync.ReceiverAdapter(target, rendezvous=rendezvous(path), config=config) as receiver,
    ):
        together(sender.connect, receiver.connect)
        staging = receiver._rollout._engine._context.staging  # no public property
        assert isinstance(staging, InPlaceReceiver) == (way == "in place")
        yield Pair(sender, receiver, weights, parameters)
