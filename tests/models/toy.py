"""A toy model with awkward layouts: fused and sharded on the rollout, row-sharded on the trainer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from wbridge.ids import WorkerId
from wbridge.layout.source_map import TensorSpec
from wbridge.session.endpoints import Source, Target

HIDDEN, INTER, VOCAB, HEADS, HEAD = 16, 24, 37, 4, 8

SHAPES: Mapping[str, tuple[int, ...]] = {
    "embed.weight": (VOCAB, HIDDEN),
    "q.weight": (HEADS * HEAD, HIDDEN),
    "k.weight": (2 * HEAD, HIDDEN),
    "v.weight": (2 * HEAD, HIDDEN),
    "gate.weight": (INTER, HIDDEN),
    "up.weight": (INTER, HIDDEN),
    "down.weight": (HIDDEN, INTER),
    "norm.weight": (HIDDEN,),
    "scale": (),
}


def specs(dtype: str = "float32") -> dict[str, TensorSpec]:
    return {name: TensorSpec(shape, dtype) for name, shape in SHAPES.items()}


def weights(version: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The full checkpoint of one version: every element tells version, tensor and place."""
    return {
        name: (
            torch.arange(max(1, torch.Size(shape).numel()), dtype=torch.float32).reshape(shape) + 1000.0 * i
        )
        .add(version * 100_000.0)
        .to(dtype)
        for i, (name, shape) in enumerate(SHAPES.items())
    }


def rows(total: int, rank: int, size: int) -> slice:
    """Uneven row shards as FSDP2 makes them: ceil chunks, the last ones short or empty."""
    chunk = -(-total // size)
    return slice(min(rank * chunk, total), min((rank + 1) * chunk, total))


class Trainer:
    """One trainer rank: rows of every tensor, whole 0-d tensors on every rank."""

    def __init__(
        self, rank: int = 0, size: int = 1, dtype: torch.dtype = torch.float32, *, device: str = "cpu"
    ) -> None:
        self.rank, self.size, self.dtype = rank, size, dtype
        self.parameters = {name: self._mine(t).to(device, copy=True) for name, t in weights(0, dtype).items()}

    def _mine(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[rows(tensor.shape[0], self.rank, self.size)] if tensor.ndim else tensor

    def set_version(self, version: int) -> None:
        for name, tensor in weights(version, self.dtype).items():
            self.parameters[name].copy_(self._mine(tensor))

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self.parameters[name].copy_(self._mine(tensor))

    @property
    def source(self) -> Source:
        return Source(
            worker=WorkerId("trainer", "trainer", (self.size,), (self.rank,)),
            checkpoint=specs(str(self.dtype).removeprefix("torch.")),
            parameters=self.parameters,
            load_weights=self.load_weights,
        )


class Rollout:
    """One tensor-parallel rollout rank: fused qkv and gate/up, column-sharded down, replicated norm."""

    def __init__(
        self,
        engine: str = "engine-0",
        rank: int = 0,
        size: int = 1,
        dtype: torch.dtype = torch.float32,
        *,
        device: str = "cpu",
    ) -> None:
        self.engine, self.rank, self.size = engine, rank, size
        q, kv, inter = HEADS * HEAD // size, max(1, 2 // size) * HEAD, INTER // size
        self.parameters = {
            "embed": torch.full((VOCAB, HIDDEN), -1.0, dtype=dtype, device=device),
            "qkv": torch.full((q + 2 * kv, HIDDEN), -1.0, dtype=dtype, device=device),
            "gate_up": torch.full((2 * inter, HIDDEN), -1.0, dtype=dtype, device=device),
            "down": torch.full((HIDDEN, inter), -1.0, dtype=dtype, device=device),
            "norm": torch.full((HIDDEN,), -1.0, dtype=dtype, device=device),
            "scale": torch.full((), -1.0, dtype=dtype, device=device),
        }

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        p, rank, size = self.parameters, self.rank, self.size
        q, kv, inter = HEADS * HEAD // size, max(1, 2 // size) * HEAD, INTER // size
        kv_rank = rank * 2 // size if size > 2 else rank
        targets = {
            "embed.weight": lambda t: p["embed"].copy_(t),
            "q.weight": lambda t: p["qkv"][:q].copy_(t[rank * q : (rank + 1) * q]),
            "k.weight": lambda t: p["qkv"][q : q + kv].copy_(t[kv_rank * kv : (kv_rank + 1) * kv]),
            "v.weight": lambda t: p["qkv"][q + kv :].copy_(t[kv_rank * kv : (kv_rank + 1) * kv]),
            "gate.weight": lambda t: p["gate_up"][:inter].copy_(t[rank * inter : (rank + 1) * inter]),
            "up.weight": lambda t: p["gate_up"][inter:].copy_(t[rank * inter : (rank + 1) * inter]),
            "down.weight": lambda t: p["down"].copy_(t[:, rank * inter : (rank + 1) * inter]),
            "norm.weight": lambda t: p["norm"].copy_(t),
            "scale": lambda t: p["scale"].copy_(t),
        }
        for name, tensor in tensors:
            targets[name](tensor)

    def expected(self, version: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        """On the host; `dtype` is what the trainers hold."""
        twin = Rollout(self.engine, self.rank, self.size, self.parameters["embed"].dtype)
        twin.load_weights(weights(version, dtype).items())
        return twin.parameters

    def holds(self, version: int, dtype: torch.dtype = torch.float32) -> bool:
        expected = self.expected(version, dtype)
        return all(torch.equal(t, self.parameters[n].cpu()) for n, t in expected.items())

    @property
    def target(self) -> Target:
        return Target(
            worker=WorkerId("rollout", self.engine, (self.size,), (self.rank,)),
            checkpoint=specs(),
            parameters=self.parameters,
            load_weights=self.load_weights,
        )
