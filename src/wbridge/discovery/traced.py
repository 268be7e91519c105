"""Traced tensors, and the meta stand-ins on which their operators run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol  # operator arguments and results are whatever the loader uses

import torch

from wbridge.discovery.content import CONSTANT, Content, FromCheckpoint, Piece, View, of_origin
from wbridge.discovery.specs import dtype_name
from wbridge.layout.region import Strided

Key = tuple[int, torch.dtype]
"""A storage seen as elements of one dtype."""


class Runner(Protocol):
    """Executes operators on traced tensors."""

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any: ...


class Traced(torch.Tensor):
    """A tensor without memory that knows which checkpoint elements it would hold.

    `twin` is a meta tensor with the same geometry; all views of one `Content` share its storage.
    """

    twin: torch.Tensor
    content: Content
    tracer: Runner

    @staticmethod
    def __new__(cls, twin: torch.Tensor, content: Content, tracer: Runner, device: torch.device) -> Traced:
        made: Traced = torch.Tensor._make_wrapper_subclass(
            cls,
            twin.shape,
            strides=twin.stride(),
            storage_offset=twin.storage_offset(),
            dtype=twin.dtype,
            device=device,
        )
        made.twin, made.content, made.tracer = twin, content, tracer
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]  # torch's is untyped
        return f"Traced({', '.join(self.content.tensors())}, shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub lacks `func`
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        traced = next(t for t in tensors_in(args, kwargs or {}) if isinstance(t, Traced))
        return traced.tracer.run(func, args, kwargs or {})


class Twins:
    """The meta stand-ins of one call's tensors, and the content behind each."""

    def __init__(self, contents: Mapping[Key, Content]) -> None:
        self._contents = contents
        self._by_storage: dict[int, Content] = {}
        self._made: dict[int, torch.Tensor] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the twin, with the geometry that `tensor` has in its own storage."""
        if isinstance(tensor, Traced):
            twin, content = tensor.twin, tensor.content
        else:
            found = self._contents.get((storage_key(tensor), tensor.dtype))
            if id(tensor) not in self._made:
                end = tensor.storage_offset() + num_stored(tensor)
                flat = torch.empty(end, dtype=tensor.dtype, device="meta")
                geometry = tensor.shape, tensor.stride(), tensor.storage_offset()
                self._made[id(tensor)] = flat.as_strided(*geometry)
            twin = self._made[id(tensor)]
            if found is None:
                return twin
            content = found
        self._by_storage[storage_key(twin)] = content
        return twin

    def all(self, value: Any) -> Any:
        """Replace every tensor."""
        return replaced(value, self.of)

    def some(self, value: Any) -> Any:
        """Replace the tensors whose content is known; leave real ones, such as an index, as they are."""
        return replaced(value, lambda t: self.of(t) if self._is_known(t) else t)

    def content(self, twin: torch.Tensor) -> Content | None:
        return self._by_storage.get(storage_key(twin))

    def tensors(self, without: torch.Tensor | None = None) -> tuple[str, ...]:
        """Return the checkpoint tensors behind the twins."""
        skipped = None if without is None else self.content(self.of(without))
        found = [c.tensors() for c in self._by_storage.values() if c is not skipped]
        return tuple(dict.fromkeys(t for tensors in found for t in tensors))

    def _is_known(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, Traced) or (storage_key(tensor), tensor.dtype) in self._contents


def moved(moves: list[tuple[torch.Tensor, torch.Tensor]], twins: Twins) -> list[Piece]:
    """Return the pieces that copies from the second to the first view of each pair leave there."""
    pieces: list[Piece] = []
    for target, source in moves:
        if not target.numel():
            continue
        extents, place = tuple(target.shape), place_of(target)
        content = twins.content(source)
        if content is None:
            pieces.append(of_origin(CONSTANT, extents, place))
            continue
        found = content.read(View(extents, place_of(source)), place)
        if source.dtype != target.dtype:
            found = (_cast(piece, dtype_name(target.dtype)) for piece in found)
        pieces += found
    return pieces


def _cast(piece: Piece, dtype: str) -> Piece:
    if not isinstance(piece.origin, FromCheckpoint):
        return piece
    return Piece(FromCheckpoint(piece.origin.tensor, (*piece.origin.casts, dtype)), piece.region)


def place_of(tensor: torch.Tensor) -> Strided:
    """Return where a view lies in its storage."""
    return Strided(int(tensor.storage_offset()), tuple(tensor.stride()))


def storage_key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def num_stored(tensor: torch.Tensor) -> int:
    """Elements from the first to the last one of a view."""
    if not tensor.numel():
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def tensors_in(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the strided tensors among the arguments of an operator, those in lists included."""
    for value in (*args, *kwargs.values()):
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, torch.Tensor) and item.layout is torch.strided:
                yield item


def replaced(value: Any, replace: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return an operator's arguments or results with every tensor replaced."""
    if isinstance(value, torch.Tensor):
        return replace(value)
    if isinstance(value, dict):
        return {k: replaced(v, replace) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(replaced(v, replace) for v in value)
    return value


def written_by(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the arguments that an operator writes, by its schema."""
    found: list[torch.Tensor] = []
    for position, name in _written_arguments(func):
        value = args[position] if position < len(args) else kwargs.get(name)
        if value is not None:
            found += tensors_in((value,), {})
    return found


@lru_cache(maxsize=4096)
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    arguments = func._schema.arguments
    return tuple(
        (k, a.name) for k, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write
    )


@lru_cache(maxsize=4096)
def is_view(func: Any) -> bool:
    """Return whether an operator gives a view of an argument and touches no element."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
