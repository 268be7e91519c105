"""Fleets from a model's config and a parallelism, without weights: what a planner needs of a job to come."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence

import msgspec

from wbridge.errors import ConfigError
from wbridge.ids import WorkerId
from wbridge.layout.region import Region, Strided
from wbridge.plan.geometry import packed
from wbridge.plan.tables import Column, MapTable, Row, columns_of, table_of

Range = tuple[int, int]


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """The shapes of a mixture-of-experts transformer; `latent` ranks of multi-head latent attention."""

    name: str
    num_layers: int
    num_dense_layers: int = 0
    num_experts: int
    hidden: int
    expert_hidden: int
    dense_hidden: int = 0
    shared_hidden: int = 0
    num_heads: int
    num_kv_heads: int
    head: int = 128
    latent: tuple[int, int, int] = (0, 0, 0)
    """Ranks of query and key-value compression and the rotary part of a head; zeros: plain attention."""
    vocab: int
    tied: bool = False
    """The embedding is the head as well."""
    dtype: str = "bfloat16"


MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        Model(
            name="Qwen3-30B-A3B", num_layers=48, num_experts=128, hidden=2048, expert_hidden=768,
            num_heads=32, num_kv_heads=4, vocab=151936,
        ),
        Model(
            name="Qwen3-235B-A22B", num_layers=94, num_experts=128, hidden=4096, expert_hidden=1536,
            num_heads=64, num_kv_heads=4, vocab=151936,
        ),
        Model(
            name="Moonlight-16B-A3B", num_layers=27, num_dense_layers=1, num_experts=64, hidden=2048,
            expert_hidden=1408, dense_hidden=11264, shared_hidden=2816, num_heads=16, num_kv_heads=16,
            latent=(0, 512, 64), vocab=163840,
        ),
        Model(
            name="Kimi-K2", num_layers=61, num_dense_layers=1, num_experts=384, hidden=7168,
            expert_hidden=2048, dense_hidden=18432, shared_hidden=2048, num_heads=64, num_kv_heads=64,
            latent=(1536, 512, 64), vocab=163840,
        ),
    )
}  # fmt: skip


class Parallelism(msgspec.Struct, frozen=True, kw_only=True):
    """How one group of workers divides a model.

    Layers go to `pp` stages, heads and rows to `tp` ranks; experts whole to `ep` ranks of a stage, or with
    `ep` 1 by rows to the `tp` ranks. With `fsdp` instead, the first dim of each tensor goes to that many.
    Workers beyond that are replicas.
    """

    pp: int = 1
    tp: int = 1
    ep: int = 1
    fsdp: int = 0
    fused: bool = False
    """Parameters as an inference engine has them: query, key and value in one, all experts in two."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Some equal workers of a fleet: `num_groups` engines, or one group of trainers."""

    workers_per_group: int
    num_groups: int = 1
    parallelism: Parallelism = Parallelism()


class Fleet(msgspec.Struct, frozen=True):
    """What a planner reads of a job: a table and a host for each worker."""

    tables: dict[WorkerId, MapTable]
    hosts: dict[WorkerId, str]


def build_fleet(model: Model, trainers: Part, rollouts: tuple[Part, ...], *, gpus_per_host: int = 8) -> Fleet:
    """Return the tables and hosts of a fleet; trainers and rollouts are on different hosts.

    Raises:
        ConfigError: a group is not a multiple of what its parallelism takes.
    """
    tables: dict[WorkerId, MapTable] = {}
    hosts: dict[WorkerId, str] = {}
    known: dict[tuple[object, ...], MapTable] = {}
    columns: dict[Column, Column] = {}
    tensors = tuple(tensors_of(model))
    divided: dict[Parallelism, _Divided] = {}
    for role, parts in (("trainer", (trainers,)), ("rollout", rollouts)):
        placed = 0
        for number, part in enumerate(parts):
            for group in range(part.num_groups):
                name = "train" if role == "trainer" else f"engine{number}.{group:03}"
                size = part.workers_per_group
                for rank in range(size):
                    place = _place(part.parallelism, rank, size)
                    key = (part.parallelism, place)
                    if key not in known:
                        if part.parallelism not in divided:
                            divided[part.parallelism] = _Divided(model, tensors, part.parallelism)
                        known[key] = _table(model, divided[part.parallelism], place, columns)
                    worker = WorkerId(role, name, (size,), (rank,))  # type: ignore[arg-type]  # literals above
                    tables[worker] = known[key]
                    hosts[worker] = f"{role}-host{placed // gpus_per_host:03}"
                    placed += 1
    return Fleet(tables, hosts)


class _Place(msgspec.Struct, frozen=True):
    stage: int
    tp: int
    ep: int
    shard: int


def _place(parallelism: Parallelism, rank: int, size: int) -> _Place:
    p = parallelism
    per_stage = size // p.pp
    if size % p.pp or per_stage % p.tp or per_stage % p.ep or (p.fsdp and size % p.fsdp):
        raise ConfigError(f"{size} workers do not divide into {p}; change one of them")
    stage, inside = divmod(rank, per_stage)
    return _Place(stage, inside % p.tp, inside % p.ep, rank % p.fsdp if p.fsdp else 0)


class _Tensor(msgspec.Struct, frozen=True):
    """A checkpoint tensor and how it is divided: `rows`, `columns`, `heads`, `whole` or by `expert`."""

    name: str
    shape: tuple[int, ...]
    kind: str
    layer: int = -1
    expert: int = -1
    parameter: str = ""
    turn: int = 0
    """Its place among those that an engine keeps in one parameter."""
    num_heads: int = 0


def tensors_of(model: Model) -> Iterator[_Tensor]:
    """Yield every checkpoint tensor."""
    hidden = model.hidden
    yield _Tensor("model.embed_tokens.weight", (model.vocab, hidden), "rows", layer=0)
    if not model.tied:
        yield _Tensor("lm_head.weight", (model.vocab, hidden), "rows", layer=model.num_layers - 1)
    yield _Tensor("model.norm.weight", (hidden,), "whole", layer=model.num_layers - 1)
    for layer in range(model.num_layers):
        prefix = f"model.layers.{layer}."
        attention = _latent(model, prefix, layer) if any(model.latent) else _plain(model, prefix, layer)
        yield from attention
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield _Tensor(f"{prefix}{norm}.weight", (hidden,), "whole", layer)
        if layer < model.num_dense_layers:
            yield from _mlp(prefix + "mlp.", hidden, model.dense_hidden, layer)
            continue
        yield _Tensor(f"{prefix}mlp.gate.weight", (model.num_experts, hidden), "whole", layer)
        if model.shared_hidden:
            yield from _mlp(prefix + "mlp.shared_experts.", hidden, model.shared_hidden, layer)
        for expert in range(model.num_experts):
            for tensor in _mlp(f"{prefix}mlp.experts.{expert}.", hidden, model.expert_hidden, layer):
                parameter = f"{prefix}mlp.experts.{'w2' if tensor.kind == 'columns' else 'w13'}"
                yield msgspec.structs.replace(tensor, expert=expert, parameter=parameter)


def _plain(model: Model, prefix: str, layer: int) -> Iterator[_Tensor]:
    wide, hidden = model.num_heads * model.head, model.hidden
    fused = f"{prefix}self_attn.qkv_proj.weight"
    sizes = (("q", wide, 0), ("k", model.num_kv_heads * model.head, model.num_kv_heads))
    for letter, size, heads in (*sizes, ("v", *sizes[1][1:])):
        name = f"{prefix}self_attn.{letter}_proj.weight"
        kind = "heads" if heads else "rows"
        yield _Tensor(name, (size, hidden), kind, layer, parameter=fused, turn="qkv".index(letter),
                      num_heads=heads)  # fmt: skip
    yield _Tensor(f"{prefix}self_attn.o_proj.weight", (hidden, wide), "columns", layer)
    for letter in "qk":
        yield _Tensor(f"{prefix}self_attn.{letter}_norm.weight", (model.head,), "whole", layer)


def _latent(model: Model, prefix: str, layer: int) -> Iterator[_Tensor]:
    query, key_value, rotary = model.latent
    hidden, wide = model.hidden, model.num_heads * (model.head + rotary)
    name = prefix + "self_attn."
    if query:
        yield _Tensor(f"{name}q_a_proj.weight", (query, hidden), "whole", layer)
        yield _Tensor(f"{name}q_a_layernorm.weight", (query,), "whole", layer)
        yield _Tensor(f"{name}q_b_proj.weight", (wide, query), "rows", layer)
    else:
        yield _Tensor(f"{name}q_proj.weight", (wide, hidden), "rows", layer)
    yield _Tensor(f"{name}kv_a_proj_with_mqa.weight", (key_value + rotary, hidden), "whole", layer)
    yield _Tensor(f"{name}kv_a_layernorm.weight", (key_value,), "whole", layer)
    yield _Tensor(f"{name}kv_b_proj.weight", (model.num_heads * 2 * model.head, key_value), "rows", layer)
    yield _Tensor(f"{name}o_proj.weight", (hidden, model.num_heads * model.head), "columns", layer)


def _mlp(prefix: str, hidden: int, inner: int, layer: int) -> Iterator[_Tensor]:
    fused = prefix + "gate_up_proj.weight"
    yield _Tensor(f"{prefix}gate_proj.weight", (inner, hidden), "rows", layer, parameter=fused, turn=0)
    yield _Tensor(f"{prefix}up_proj.weight", (inner, hidden), "rows", layer, parameter=fused, turn=1)
    yield _Tensor(f"{prefix}down_proj.weight", (hidden, inner), "columns", layer)


class _Divided:
    """Tensors by the workers that may hold something of them, so that each worker looks at few."""

    def __init__(self, model: Model, tensors: Sequence[_Tensor], p: Parallelism) -> None:
        self.parallelism = p
        self._by_place: dict[tuple[int, int], list[tuple[int, _Tensor]]] = {}
        for number, tensor in enumerate(tensors):
            key = _EVERYWHERE
            if not p.fsdp:
                owner = tensor.expert * p.ep // model.num_experts if tensor.expert >= 0 and p.ep > 1 else -1
                key = tensor.layer * p.pp // model.num_layers, owner
            self._by_place.setdefault(key, []).append((number, tensor))

    def tensors_at(self, place: _Place) -> Iterator[_Tensor]:
        """Yield them in the order of the checkpoint."""
        keys = (_EVERYWHERE, (place.stage, -1), (place.stage, place.ep))
        for _, tensor in heapq.merge(*(self._by_place.get(key, ()) for key in keys), key=lambda own: own[0]):
            yield tensor


_EVERYWHERE = (-1, -1)


def _table(model: Model, divided: _Divided, place: _Place, columns: dict[Column, Column]) -> MapTable:
    """Return the table of the worker at `place`; equal columns of several workers are one object."""
    p = divided.parallelism
    found: dict[tuple[tuple[int, ...], Region], list[tuple[str, str, int]]] = {}
    ends: dict[str, int] = {}
    for tensor in divided.tensors_at(place):
        box = _box(model, p, place, tensor)
        if box is None or any(start == stop for start, stop in box):
            continue
        parameter, offset = tensor.name, 0
        if p.fused and tensor.parameter:  # what is fused lies one after the other
            parameter = tensor.parameter
            offset = ends.get(parameter, 0)
            ends[parameter] = offset + math.prod(stop - start for start, stop in box)
        found.setdefault((tensor.shape, _region(tensor.shape, box)), []).append(
            (tensor.name, parameter, offset)
        )
    rows: list[Row] = []
    for (shape, region), places in found.items():
        for column in columns_of(places):
            rows.append(Row(shape, model.dtype, region, columns.setdefault(column, column)))
    return table_of(rows)


def _box(model: Model, p: Parallelism, place: _Place, tensor: _Tensor) -> tuple[Range, ...] | None:
    """Return the part of a tensor that a worker holds; None: nothing of it."""
    whole = tuple((0, extent) for extent in tensor.shape)
    if p.fsdp:
        return (_chunk(tensor.shape[0], place.shard, p.fsdp), *whole[1:])
    if tensor.layer * p.pp // model.num_layers != place.stage:
        return None
    if tensor.expert >= 0 and p.ep > 1:
        return whole if tensor.expert * p.ep // model.num_experts == place.ep else None
    if tensor.kind == "whole":
        return whole
    dim = 1 if tensor.kind == "columns" else 0
    parts = min(p.tp, tensor.num_heads) if tensor.num_heads else p.tp
    span = _chunk(tensor.shape[dim], place.tp * parts // p.tp, parts)
    return (*whole[:dim], span, *whole[dim + 1 :])


def _chunk(extent: int, index: int, parts: int) -> Range:
    step = -(-extent // parts)
    return min(index * step, extent), min((index + 1) * step, extent)


def _region(shape: tuple[int, ...], box: tuple[Range, ...]) -> Region:
    strides = packed(shape)
    extents = tuple(stop - start for start, stop in box)
    first = sum(start * stride for (start, _), stride in zip(box, strides, strict=True))
    return Region(extents, source=Strided(first, strides), target=Strided(0, packed(extents)))
