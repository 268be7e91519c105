"""What trainers and rollouts hold in each case, the copies between them, and contents that tell the version.

Weights are bfloat16 and compared as 16-bit integers, so any bit pattern counts. The contents are a function
of tensor and version in which every update changes nearly every element.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

Shape = tuple[int, ...]
Parameters = dict[str, torch.Tensor]
ITEM_NBYTES = 2
CHUNK = 1 << 22
SHIFTS = 1 << 16


class Tensor(NamedTuple):
    """A checkpoint tensor; `split` is the dimension that tensor parallelism shards, None if none."""

    name: str
    shape: Shape
    split: int | None


class Box(NamedTuple):
    """Rows and columns of a matrix; a vector is one column."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def nbytes(self) -> int:
        return (self.bottom - self.top) * (self.right - self.left) * ITEM_NBYTES

    def common(self, other: Box) -> Box | None:
        top, bottom = max(self.top, other.top), min(self.bottom, other.bottom)
        left, right = max(self.left, other.left), min(self.right, other.right)
        return Box(top, bottom, left, right) if top < bottom and left < right else None

    def within(self, whole: Box, *, below: int = 0) -> Box:
        """This box in coordinates of `whole`, which lies `below` rows into something."""
        rows, columns = below - whole.top, -whole.left
        return Box(self.top + rows, self.bottom + rows, self.left + columns, self.right + columns)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of `tensor` in this box, as a view."""
        if tensor.dim() == 1:
            return tensor[self.top : self.bottom]
        return tensor[self.top : self.bottom, self.left : self.right]


class Move(NamedTuple):
    """Part of a trainer's parameter that must land in part of a rollout's."""

    trainer: int
    source: str
    source_box: Box
    rollout: int
    target: str
    target_box: Box
    tensor: Tensor
    box: Box


@dataclass(frozen=True)
class Job:
    """How many workers a case has, and how they split a model."""

    num_trainers: int = 1
    trainer_parallel: int = 1
    num_rollouts: int = 1
    rollout_parallel: int = 1
    is_fused: bool = False


JOBS = {
    "w2rep": Job(num_trainers=2, trainer_parallel=2, num_rollouts=2, is_fused=True),
    "w2tp": Job(num_trainers=2, trainer_parallel=2, num_rollouts=2, rollout_parallel=2, is_fused=True),
}
FUSED = {
    "q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj",
}  # fmt: skip


class Workload:
    """Who holds what, and what goes where."""

    def __init__(self, job: Job, tensors: Sequence[Tensor]) -> None:
        self.job = job
        self.tensors = tensors
        self.index = {tensor.name: index for index, tensor in enumerate(self.tensors)}
        self.trainer_shapes = {t.name: shard(t, self.job.trainer_parallel) for t in self.tensors}
        self.rollout_shapes: dict[str, Shape] = {}
        self.places: dict[str, tuple[str, int]] = {}
        """The rollout parameter of each checkpoint tensor, and how many rows above it lies."""
        self._place_rollout()
        self.moves = list(self._iter_moves())
        self.nbytes = sum(move.box.nbytes for move in self.moves)
        """What must land."""

    def shapes(self, role: str) -> dict[str, Shape]:
        return self.trainer_shapes if role == "trainer" else self.rollout_shapes

    def moves_of(self, role: str, rank: int) -> list[Move]:
        return [m for m in self.moves if (m.trainer if role == "trainer" else m.rollout) == rank]

    def _place_rollout(self) -> None:
        for tensor in self.tensors:
            shape = shard(tensor, self.job.rollout_parallel)
            leaf = tensor.name.split(".")[-2] if "." in tensor.name else tensor.name
            name = (
                tensor.name.replace(leaf, FUSED[leaf]) if self.job.is_fused and leaf in FUSED else tensor.name
            )
            row = self.rollout_shapes.get(name, (0,))[0]
            self.places[tensor.name] = name, row
            self.rollout_shapes[name] = (row + shape[0], *shape[1:])

    def _iter_moves(self) -> Iterator[Move]:
        job = self.job
        for index, tensor in enumerate(self.tensors):
            holders = [index % job.num_trainers] if tensor.split is None else range(job.num_trainers)
            for rollout in range(job.num_rollouts):
                wanted = owned(tensor, job.rollout_parallel, rollout)
                for trainer in holders:
                    held = owned(tensor, job.trainer_parallel, trainer)
                    box = wanted.common(held)
                    if box is None:
                        continue
                    name, row = self.places[tensor.name]
                    target = box.within(wanted, below=row)
                    yield Move(trainer, tensor.name, box.within(held), rollout, name, target, tensor, box)


def workload_of(case: str, part: float = 1.0) -> Workload:
    """The workload of a case of the benchmark beside peers, or about that part of its tensors."""
    if case in ("tiny", "idle"):
        return Workload(Job(), tiny())
    tensors = small_tensors(part) if case == "w3" else qwen3(part)
    return Workload(JOBS.get(case, Job()), tensors)


def qwen3(part: float = 1.0) -> list[Tensor]:
    """Qwen3-0.6B: 1.19 GB in 310 tensors."""
    layers = [tensor for k in range(max(1, round(28 * part))) for tensor in qwen3_layer(k)]
    num_rows = max(1, round(18992 * part)) * 8
    ends = (
        Tensor("model.embed_tokens.weight", (num_rows, 1024), 0),
        Tensor("model.norm.weight", (1024,), None),
    )
    return [ends[0], *layers, ends[1]]


def qwen3_layer(k: int, hidden: int = 1024) -> list[Tensor]:
    """One layer: 31 MB at a hidden size of 1024, and with it every matrix smaller by the square."""
    shapes: list[tuple[str, Shape, int | None]] = [
        ("input_layernorm", (hidden,), None),
        ("self_attn.q_proj", (2 * hidden, hidden), 0),
        ("self_attn.k_proj", (hidden, hidden), 0),
        ("self_attn.v_proj", (hidden, hidden), 0),
        ("self_attn.o_proj", (hidden, 2 * hidden), 1),
        ("self_attn.q_norm", (128,), None),
        ("self_attn.k_norm", (128,), None),
        ("post_attention_layernorm", (hidden,), None),
        ("mlp.gate_proj", (3 * hidden, hidden), 0),
        ("mlp.up_proj", (3 * hidden, hidden), 0),
        ("mlp.down_proj", (hidden, 3 * hidden), 1),
    ]
    return [Tensor(f"model.layers.{k}.{name}.weight", shape, split) for name, shape, split in shapes]


def small_tensors(part: float = 1.0) -> list[Tensor]:
    """20,000 tensors of 8 to 64 KiB."""
    draw, count = random.Random(7), max(1, round(20_000 * part))
    return [Tensor(f"experts.{k}.weight", (draw.randrange(4096, 32769, 64),), None) for k in range(count)]


def tiny() -> list[Tensor]:
    """One tensor of 4 KiB."""
    return [Tensor("weight", (2048,), None)]


def shard(tensor: Tensor, size: int) -> Shape:
    return tuple(n // size if k == tensor.split else n for k, n in enumerate(tensor.shape))


def owned(tensor: Tensor, size: int, rank: int) -> Box:
    """What worker `rank` of a tensor-parallel group of `size` holds of a tensor; groups follow each other."""
    rows, columns = tensor.shape if len(tensor.shape) == 2 else (tensor.shape[0], 1)
    rank %= size
    if tensor.split == 0:
        return Box(rank * rows // size, (rank + 1) * rows // size, 0, columns)
    if tensor.split == 1:
        return Box(0, rows, rank * columns // size, (rank + 1) * columns // size)
    return Box(0, rows, 0, columns)


def fill_trainer(workload: Workload, rank: int, parameters: Parameters, version: int) -> None:
    size = workload.job.trainer_parallel
    for tensor in workload.tensors:
        held = owned(tensor, size, rank).of(contents(workload, tensor, version))
        parameters[tensor.name].view(torch.int16).copy_(held)


def wrong_parts(workload: Workload, rank: int, parameters: Parameters, version: int) -> list[str]:
    """Return the rollout parameters that do not hold `version`, every bit compared."""
    bad = []
    for move in workload.moves_of("rollout", rank):
        found = move.target_box.of(parameters[move.target].view(torch.int16))
        if not torch.equal(found, move.box.of(contents(workload, move.tensor, version))):
            bad.append(move.target)
    return bad


def contents(workload: Workload, tensor: Tensor, version: int) -> torch.Tensor:
    """The whole checkpoint tensor at a version. Short ones are views of the noise."""
    shift = workload.index[tensor.name] * 7919 + version * 10473
    numel = math.prod(tensor.shape)
    chunks = [
        noise()[(start := (shift + k * 3001) % SHIFTS) : start + min(CHUNK, numel - k * CHUNK)]
        for k in range(-(-numel // CHUNK))
    ]
    return (chunks[0] if len(chunks) == 1 else torch.cat(chunks)).view(tensor.shape)


@functools.cache
def noise() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(-32768, 32767, (CHUNK + SHIFTS,), dtype=torch.int16, generator=generator)
