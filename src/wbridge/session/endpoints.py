"""Source and Target: the plain description of what one worker holds; integrations build them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from wbridge.errors import ConfigError
from wbridge.ids import WorkerId
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
        _check(self.worker, "trainer", self.source_map, self.load_weights)


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout worker: its live parameters, and the loader that says how they relate to the checkpoint.

    `worker.group` is the engine's name. `atomic` lists sets of checkpoint tensors that `load_weights`
    needs in one call. `load_assembled` takes whole checkpoint tensors where arithmetic in the loader
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
        _check(self.worker, "rollout", self.source_map, self.load_weights)


def _check(worker: WorkerId, role: str, source_map: object, load_weights: object) -> None:
    if worker.role != role:
        raise ConfigError(f"{worker}: a {role} is described by a worker whose role is {role!r}")
    if source_map is None and load_weights is None:
        raise ConfigError(f"{worker}: give `source_map`, or `load_weights` so that wbridge can watch it")
