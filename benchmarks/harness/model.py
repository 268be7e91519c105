"""A model whose halves two trainers hold and whose tensor-parallel shards engines run with."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from wbridge.ids import WorkerId
from wbridge.layout.source_map import TensorSpec
from wbridge.session.endpoints import Source, Target

HIDDEN = 2048
LAYER_HALF_NBYTES = 2**24
"""Each of two halves of a layer: two bfloat16 matrices of `HIDDEN` by twice that."""

Parameters = dict[str, torch.Tensor]


def shapes(num_layers: int) -> dict[str, tuple[int, int]]:
    names = {"up": (2 * HIDDEN, HIDDEN), "down": (HIDDEN, 2 * HIDDEN)}
    return {f"{k}.{name}": shape for k in range(num_layers) for name, shape in names.items()}


def checkpoint(num_layers: int) -> dict[str, TensorSpec]:
    return {name: TensorSpec(shape, "bfloat16") for name, shape in shapes(num_layers).items()}


def part(tensor: torch.Tensor, *, dim: int, rank: int, size: int) -> torch.Tensor:
    rows = tensor.shape[dim] // size
    return tensor.narrow(dim, rank * rows, rows)


def trainer_source(
    rank: int, size: int, num_layers: int, *, device: str = "cpu"
) -> tuple[Source, Parameters]:
    """Describe a trainer that holds every `size`-th part of the rows of each tensor, as FSDP leaves it."""
    parameters = {
        name: torch.zeros(rows // size, columns, dtype=torch.bfloat16, device=device)
        for name, (rows, columns) in shapes(num_layers).items()
    }

    def load_weights(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            parameters[name].copy_(part(tensor, dim=0, rank=rank, size=size))

    worker = WorkerId("trainer", "trainer", (size,), (rank,))
    return Source(
        worker=worker,
        checkpoint=checkpoint(num_layers),
        parameters=parameters,
        load_weights=load_weights,
    ), parameters


def rollout_target(
    engine: str, rank: int, size: int, num_layers: int, *, device: str = "cpu"
) -> tuple[Target, Parameters]:
    """Describe a rollout with the usual tensor parallelism: rows of `up`, columns of `down`."""
    parameters = {
        name: torch.zeros(
            *((rows // size, columns) if name.endswith("up") else (rows, columns // size)),
            dtype=torch.bfloat16,
            device=device,
        )
        for name, (rows, columns) in shapes(num_layers).items()
    }

    def load_weights(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            dim = 0 if name.endswith("up") else 1
            parameters[name].copy_(part(tensor, dim=dim, rank=rank, size=size))

    worker = WorkerId("rollout", engine, (size,), (rank,))
    return Target(
        worker=worker,
        checkpoint=checkpoint(num_layers),
        parameters=parameters,
        load_weights=load_weights,
    ), parameters


def fill(parameters: Parameters, version: int) -> None:
    """Let every element tell its version."""
    for tensor in parameters.values():
        tensor.fill_(_value(version))


def holds(parameters: Parameters, version: int) -> bool:
    return all(bool((tensor == _value(version)).all()) for tensor in parameters.values())


def _value(version: int) -> float:
    return float(version % 200 + 1)  # bfloat16 holds whole numbers up to 256
