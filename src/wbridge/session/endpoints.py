"""Source and Target: the plain description of what one worker holds; integrations build them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from wbridge.errors import ConfigError, LayoutError
from wbridge.ids import WorkerId, is_shape
from wbridge.layout.dtype import ITEMSIZE
from wbridge.layout.source_map import SourceMap, TensorSpec

Tensors = Mapping[str, Any]
"""Names to live `torch.Tensor`s. `Any` keeps torch out of this layer. The mapping may be a live view of
a module: it is read again at every update, so that a replaced parameter is noticed."""

LoadWeights = Callable[[Iterable[tuple[str, Any]]], object]
"""The backend's own loader: takes (checkpoint name, tensor) pairs."""


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A trainer worker: its live parameters and how they relate to the checkpoint.

    Either `source_map` states which checkpoint elements each parameter holds, or `load_weights` is
    watched to find out. `checkpoint` gives every tensor's global shape and dtype.
    """

    worker: WorkerId
    checkpoint: Mapping[str, TensorSpec]
    parameters: Tensors
    source_map: SourceMap | None = None
    load_weights: LoadWeights | None = None
    cache_key: Mapping[str, str] = {}

    def __post_init__(self) -> None:
        _check(self, "trainer")


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout worker: its live parameters, and the loader that says how they relate to the checkpoint.

    `worker.group` is the engine's name. `atomic` lists sets of checkpoint tensors that `load_weights`
    needs in one call. What of `buffers` the loader feeds is updated like a parameter; the rest is left
    alone. `load_assembled` takes whole checkpoint tensors where arithmetic in the loader
    (quantising, repacking) makes direct writes impossible; it defaults to `load_weights`.
    `after_apply` runs on the worker when all parameters are written, before the update counts as
    applied (re-pack, re-derive).
    """

    worker: WorkerId
    checkpoint: Mapping[str, TensorSpec]
    parameters: Tensors
    source_map: SourceMap | None = None
    load_weights: LoadWeights | None = None
    load_assembled: LoadWeights | None = None
    after_apply: Callable[[], None] | None = None
    atomic: tuple[tuple[str, ...], ...] = ()
    buffers: Tensors = {}
    cache_key: Mapping[str, str] = {}

    def __post_init__(self) -> None:
        _check(self, "rollout")


def described_by(description: object, kind: type[Source] | type[Target]) -> WorkerId:
    """Return who describes itself.

    Raises:
        ConfigError: the description is not of this kind.
    """
    if not isinstance(description, kind):
        adapter = "SenderAdapter" if kind is Source else "ReceiverAdapter"
        given = type(description).__name__
        raise ConfigError(f"{adapter} takes a wbridge.{kind.__name__}, but was given a {given}")
    return description.worker


def _check(described: Source | Target, role: str) -> None:
    worker = described.worker
    if not isinstance(worker, WorkerId):
        raise ConfigError(f"worker is a {type(worker).__name__}; give a wbridge.WorkerId")
    if worker.role != role:
        raise ConfigError(f"{worker}: a {role} is described by a worker whose role is {role!r}")
    if described.source_map is None and described.load_weights is None:
        raise ConfigError(f"{worker}: give `source_map`, or `load_weights` so that wbridge can watch it")
    for field in ("checkpoint", "parameters"):
        if not isinstance(value := getattr(described, field), Mapping):
            given = type(value).__name__
            raise ConfigError(f"{worker}: {field} is a {given}; give a mapping of names, such as a dict")
    for name, spec in described.checkpoint.items():
        if reason := _unusable(name, spec):
            raise LayoutError(f"{worker}: checkpoint tensor {name!r}: {reason}")


def _unusable(name: object, spec: object) -> str:
    """Why this is no checkpoint tensor, or nothing."""
    if not isinstance(name, str):
        return "names are texts"
    if not isinstance(spec, TensorSpec):
        return f"it is a {type(spec).__name__}; describe it as wbridge.TensorSpec(shape, dtype)"
    if not is_shape(spec.shape):
        return f"shape {spec.shape!r} is no tuple of sizes; write tuple(tensor.shape)"
    if str(spec.dtype) not in ITEMSIZE:
        return f"dtype {spec.dtype!r} is not supported; use one of {', '.join(sorted(ITEMSIZE))}"
    return ""
