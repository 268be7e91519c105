"""Trace: watch a real `load_weights` on tensors without storage and write down what it copies where."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping

import msgspec
import torch

from wbridge.discovery.casts import is_one_cast
from wbridge.discovery.content import Computed, Constant, FromCheckpoint, Piece
from wbridge.discovery.pointers import Owner
from wbridge.discovery.specs import dtype_name, parameter_spec, row_major
from wbridge.discovery.traced import storage_key
from wbridge.discovery.tracer import Tracer
from wbridge.discovery.watch import watching
from wbridge.errors import LayoutError
from wbridge.layout.algebra import normalize
from wbridge.layout.region import Region, Strided
from wbridge.layout.source_map import ASSEMBLED, Mapped, OpaqueTarget, ParameterSpec, SourceMap, TensorSpec

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
"""The backend's own loader: takes (checkpoint name, tensor) pairs and fills its parameters."""


class Discovered(msgspec.Struct, frozen=True):
    """A source map, and how many elements of each parameter the loader did not even set to a constant.

    `beside` has the tensors that the loader fills beside those it was watched for, and with what.
    `overwritten` names the checkpoint tensors of which it overwrites all that it has put somewhere.
    """

    source_map: SourceMap
    untouched: dict[str, int]
    beside: list[tuple[torch.Tensor, tuple[str, ...]]] = []
    overwritten: tuple[str, ...] = ()

    @property
    def beside_tensors(self) -> list[torch.Tensor]:
        return [tensor for tensor, _ in self.beside]


def trace(
    *,
    checkpoint: Mapping[str, TensorSpec],
    parameters: Mapping[str, torch.Tensor],
    load_weights: LoadWeights,
    buffers: Mapping[str, torch.Tensor] | None = None,
    owners: Mapping[str, Owner] | None = None,
    atomic: Iterable[Iterable[str]] = (),
) -> Discovered:
    """Run `load_weights` once on stand-ins for the whole checkpoint; no live tensor is written.

    Names that share one storage view are one destination, under the first name. A buffer is a
    destination only if the loader feeds it. `owners` (see `pointers.owners_of`) lets a parameter that
    the loader replaces in its module be noticed and put back.

    Raises:
        LayoutError: the loader looks at values, replaces a parameter, or fails on traced tensors.
    """
    live = {**parameters, **(buffers or {})}
    tracer = Tracer(live)
    undo = _Undo(live, (parameters, buffers or {}), owners or {})
    _run(tracer, checkpoint, undo, load_weights)
    found = _Assembly(checkpoint)
    for name, tensor in distinct(live).items():
        pieces = tracer.pieces(tensor)
        if name in parameters or any(piece.tensors for piece in pieces):
            found.add(name, tensor, pieces)
    discovered = found.discovered(atomic)
    used = {m.tensor for m in discovered.source_map.mapped}
    overwritten = tuple(name for name in tracer.filling if name not in used)
    return msgspec.structs.replace(discovered, beside=tracer.let_go(), overwritten=overwritten)


def distinct(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leave out names whose tensor is the same view of the same storage as an earlier one (tied weights)."""
    seen: set[tuple[object, ...]] = set()
    result = {}
    for name, t in tensors.items():
        place = (storage_key(t), t.storage_offset(), tuple(t.shape), tuple(t.stride()), t.dtype)
        if place not in seen or not t.numel():
            seen.add(place)
            result[name] = t
    return result


def _run(
    tracer: Tracer, checkpoint: Mapping[str, TensorSpec], undo: _Undo, load_weights: LoadWeights
) -> None:
    def stand_ins() -> Iterator[tuple[str, torch.Tensor]]:
        for name, spec in checkpoint.items():
            yield name, tracer.checkpoint_tensor(name, spec, undo.device)

    try:
        with watching(tracer):
            load_weights(stand_ins())
    except LayoutError:
        raise
    except Exception as exc:  # foreign code: whatever it raises means that it cannot be traced
        if tracer.failure is not None:
            raise tracer.failure from exc
        raise LayoutError(
            f"load_weights failed on traced checkpoint tensors: {type(exc).__name__}: {exc}. "
            "If it works on real ones, give source_map=discover(..., method='probe'), or declare the map"
        ) from exc
    finally:
        replaced = undo.restore()
    if tracer.failure is not None:
        raise tracer.failure
    if replaced:
        raise LayoutError(
            f"load_weights replaces {len(replaced)} parameters instead of filling them, "
            f"first {replaced[0]!r}; updates are written in place, so make it copy into the parameter, "
            "or discover after the replacement"
        )


class _Undo:
    """The parameter objects as they were before a loader ran."""

    def __init__(
        self,
        live: Mapping[str, torch.Tensor],
        mappings: Iterable[Mapping[str, torch.Tensor]],
        owners: Mapping[str, Owner],
    ) -> None:
        self._before = {name: (t, t.data, storage_key(t)) for name, t in live.items()}
        self._mappings = tuple(mappings)
        self._owners = owners
        device = next(iter(live.values())).device if live else torch.device("cpu")
        self.device = torch.device("cpu") if device.type == "meta" else device

    def restore(self) -> list[str]:
        """Put back what the loader replaced; return the names it did it to."""
        replaced: dict[str, None] = {}
        for name, (tensor, data, key) in self._before.items():
            if storage_key(tensor) != key:
                tensor.data = data
                replaced[name] = None
            owner = self._owners.get(name)
            if owner is not None and _is_elsewhere(getattr(owner.object, owner.attribute, None), key):
                setattr(owner.object, owner.attribute, tensor)
                replaced[name] = None
            for mapping in self._mappings:
                if name in mapping and _is_elsewhere(mapping[name], key):
                    replaced[name] = None
                    if isinstance(mapping, MutableMapping):
                        mapping[name] = tensor
        return list(replaced)


def _is_elsewhere(found: object, key: int) -> bool:
    return not isinstance(found, torch.Tensor) or storage_key(found) != key


class _Assembly:
    """Collects parameters and their pieces into a source map."""

    def __init__(self, checkpoint: Mapping[str, TensorSpec]) -> None:
        self._checkpoint = dict(checkpoint)
        self._parameters: dict[str, ParameterSpec] = {}
        self._mapped: list[Mapped] = []
        self._opaque: list[OpaqueTarget] = []
        self._unfed: dict[str, int] = {}
        self._untouched: dict[str, int] = {}

    def add(self, name: str, tensor: torch.Tensor, pieces: list[Piece]) -> None:
        self._parameters[name] = parameter_spec(tensor)
        operation = next((how for piece in pieces if (how := self._opacity(piece, tensor))), "")
        if operation:
            tensors = tuple(dict.fromkeys(t for piece in pieces for t in piece.tensors))
            self._opaque.append(OpaqueTarget(name, tensors, operation))
            return
        fed = constant = 0
        for piece in pieces:
            if isinstance(piece.origin, FromCheckpoint):
                fed += piece.region.num_elements
                self._mapped.append(Mapped(name, piece.origin.tensor, normalize(piece.region)))
            elif isinstance(piece.origin, Constant):
                constant += piece.region.num_elements
        if fed < tensor.numel():
            self._unfed[name] = tensor.numel() - fed
        if fed + constant < tensor.numel():
            self._untouched[name] = tensor.numel() - fed - constant

    def _opacity(self, piece: Piece, tensor: torch.Tensor) -> str:
        """Return why a piece is more than a copy that the wire can do, or nothing."""
        if isinstance(piece.origin, Computed):
            return piece.origin.operation
        if not isinstance(piece.origin, FromCheckpoint):
            return ""
        source, target = self._checkpoint[piece.origin.tensor].dtype, dtype_name(tensor.dtype)
        if is_one_cast(source, piece.origin.casts, target):
            return ""
        return "cast " + " -> ".join((source, *piece.origin.casts))

    def discovered(self, atomic: Iterable[Iterable[str]]) -> Discovered:
        for tensor in dict.fromkeys(t for target in self._opaque for t in target.tensors):
            spec = self._parameters[ASSEMBLED + tensor] = row_major(self._checkpoint[tensor])
            if 0 not in spec.shape:
                whole = Strided(0, spec.strides)
                whole_region = normalize(Region(spec.shape, whole, whole))
                self._mapped.append(Mapped(ASSEMBLED + tensor, tensor, whole_region))
        return Discovered(
            SourceMap(
                checkpoint=self._checkpoint,
                parameters=self._parameters,
                mapped=tuple(self._mapped),
                opaque=tuple(self._opaque),
                atomic=tuple(tuple(names) for names in atomic),
                unfed=tuple(self._unfed.items()),
                method="trace",
            ),
            self._untouched,
        )
