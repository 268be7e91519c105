"""Backends that put weights into another layout after loading them, in place or elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
import torch

import wbridge
from tests.unit.session.job import MODES, PATIENCE_S, gather, rendezvous, settings
from wbridge.ids import WorkerId

pytestmark = pytest.mark.anyio

EXPERTS, ROWS, COLUMNS, BLOCK = 3, 8, 6, 4
SHAPES: Mapping[str, tuple[int, ...]] = {"w13": (EXPERTS, ROWS, COLUMNS), "norm": (COLUMNS,)}
SPECS = {name: wbridge.TensorSpec(shape, "float32") for name, shape in SHAPES.items()}


def weights(version: int) -> dict[str, torch.Tensor]:
    return {
        name: 1000.0 * version + 500 * i + torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        for i, (name, shape) in enumerate(SHAPES.items())
    }


class Backend:
    """Loads, then repacks. `live` is what its kernels read, `parameters` what its loader fills."""

    def __init__(self) -> None:
        self.live: dict[str, torch.Tensor] = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        self.parameters = self.live

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self.parameters[name].copy_(tensor)

    def repack(self) -> None:
        raise AssertionError("a backend says how it repacks")

    def load(self, version: int) -> None:
        """As at start-up."""
        self.load_weights(weights(version).items())
        self.repack()

    def holds(self, version: int) -> bool:
        fresh = type(self)()
        fresh.load(version)
        return all(torch.equal(tensor, self.live[name]) for name, tensor in fresh.live.items())

    @property
    def target(self) -> wbridge.Target:
        return wbridge.Target(
            worker=WorkerId("rollout", "engine-0", (1,), (0,)),
            checkpoint=SPECS,
            parameters=self.parameters,
            load_weights=self.load_weights,
            after_apply=self.repack,
        )


class InPlace(Backend):
    """Reorders the rows of each expert where they are: to do that twice is wrong."""

    def repack(self) -> None:
        self.live["w13"].copy_(self.live["w13"].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2))


class BlockMajor(Backend):
    """Keeps [E, M, N] as [E, M / 4, N, 4]; the loader's format has memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.parameters = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        self.live["w13"] = torch.zeros(EXPERTS, ROWS // BLOCK, COLUMNS, BLOCK)

    def repack(self) -> None:
        blocks = self.parameters["w13"].unflatten(1, (ROWS // BLOCK, BLOCK)).transpose(2, 3)
        self.live["w13"].copy_(blocks)
        self.live["norm"].copy_(self.parameters["norm"])


class Transposed(Backend):
    """Keeps [E, M, N] as [E, N, M]; the loader's format has memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.parameters = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        self.live["w13"] = torch.zeros(EXPERTS, COLUMNS, ROWS)

    def repack(self) -> None:
        self.live["w13"].copy_(self.parameters["w13"].transpose(1, 2))
        self.live["norm"].copy_(self.parameters["norm"])


class LoadsBlocks(BlockMajor):
    """The same layout, filled by a loader that knows it: nothing is repacked, and no memory is doubled."""

    def __init__(self) -> None:
        super().__init__()
        self.parameters = self.live

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            if name == "w13":
                tensor = tensor.unflatten(1, (ROWS // BLOCK, BLOCK)).transpose(2, 3)
            self.live[name].copy_(tensor)

    def repack(self) -> None:
        """Nothing to do."""


class LoadsTransposed(Transposed):
    """The same, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.parameters = self.live

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self.live[name].copy_(tensor.transpose(1, 2) if name == "w13" else tensor)

    def repack(self) -> None:
        """Nothing to do."""


class Quantises(Backend):
    """Computes while loading, so that whole tensors go through the loader; then reorders in place."""

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self.parameters[name].copy_(torch.round(tensor / 3))

    def repack(self) -> None:
        self.live["w13"].copy_(self.live["w13"].flip(1))


async def follow(backend: Backend, mode: str, path: Path) -> None:
    """Start like a running engine, connect, and take three versions."""
    trained = {name: torch.zeros(shape) for name, shape in SHAPES.items()}

    def load_trainer(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            trained[name].copy_(tensor)

    source = wbridge.Source(
        worker=WorkerId("trainer", "trainer", (1,), (0,)),
        checkpoint=SPECS,
        parameters=trained,
        load_weights=load_trainer,
    )
    values = settings(mode, 1)
    backend.load(0)
    sender = wbridge.SenderAdapter(source, rendezvous=rendezvous(path), config=values)
    receiver = wbridge.ReceiverAdapter(backend.target, rendezvous=rendezvous(path), config=values)
    async with sender, receiver:
        await gather(sender.connect, receiver.connect)
        assert backend.holds(0)  # finding the layout changes nothing
        for version in (1, 2, 3):
            load_trainer(weights(version).items())
            await gather(
                lambda v=version: sender.send_weights(v),  # type: ignore[misc]  # a lambda with a default
                lambda: receiver.poll_requests(wait_s=PATIENCE_S),
            )
            assert backend.holds(version)


@pytest.mark.parametrize("kind", [InPlace, Quantises])
@pytest.mark.parametrize("mode", MODES)
async def test_c30_three_updates_equal_a_fresh_load_where_repacking_twice_is_wrong(
    mode: str, kind: type[Backend], tmp_path: Path
) -> None:
    await follow(kind(), mode, tmp_path)


@pytest.mark.parametrize("kind", [BlockMajor, LoadsBlocks])
@pytest.mark.parametrize("mode", MODES)
async def test_c31_a_four_dimensional_layout_is_filled_through_the_loaders_format(
    mode: str, kind: type[Backend], tmp_path: Path
) -> None:
    await follow(kind(), mode, tmp_path)


@pytest.mark.parametrize("kind", [Transposed, LoadsTransposed])
@pytest.mark.parametrize("mode", MODES)
async def test_c32_a_transposed_layout_is_filled_through_the_loaders_format(
    mode: str, kind: type[Backend], tmp_path: Path
) -> None:
    await follow(kind(), mode, tmp_path)
