"""Other memory behind live tensors while a loader really runs, so that it cannot touch the weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any  # operator arguments and results are whatever the loader uses

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from wbridge.discovery.traced import num_stored, storage_key, written_by
from wbridge.errors import LayoutError


class Guard(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__ is untyped
    """While active, an operator that would write into live memory fails instead."""

    def __init__(self, live: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's is untyped
        self._names = {storage_key(tensor): name for name, tensor in live.items()}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first operator imports torch._dynamo: a second and 70 MB

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for target in written_by(func, args, kwargs or {}):
            name = self._names.get(storage_key(target))
            if name is not None:
                raise LayoutError(
                    f"load_weights writes into {name!r} through a tensor of its own that was made earlier; "
                    "make it look the parameter up at each call, or declare the map"
                )
        return func(*args, **(kwargs or {}))


@contextmanager
def shadowed(
    tensors: Mapping[str, torch.Tensor], *, fill: int = 0, dtype: torch.dtype | None = None
) -> Iterator[dict[str, torch.Tensor]]:
    """Swap the memory of tensor objects for copies of the same geometry, filled with `fill`.

    Yields the live tensors by name. Their memory is back when the block ends, whatever happened in
    it. Tensors that share a storage share the shadow.
    """
    unique = {id(t): t for t in tensors.values()}.values()
    saved = [(t, t.data, t.requires_grad) for t in unique]
    live = {name: t.data for name, t in tensors.items()}
    shadows = _shadows((t.data for t in unique), fill, dtype)
    try:
        for (tensor, _, _), shadow in zip(saved, shadows, strict=True):
            if tensor.is_leaf:
                tensor.requires_grad_(False)
            tensor.data = shadow
        yield live
    finally:
        for tensor, data, requires_grad in saved:
            tensor.data = data
            if tensor.is_leaf:
                tensor.requires_grad_(requires_grad)


def _shadows(tensors: Iterable[torch.Tensor], fill: int, dtype: torch.dtype | None) -> list[torch.Tensor]:
    tensors = list(tensors)
    spans: dict[tuple[int, torch.dtype], tuple[int, int]] = {}
    for t in tensors:
        low, high = spans.get((storage_key(t), t.dtype), (int(t.storage_offset()), 0))
        first = int(t.storage_offset())
        spans[storage_key(t), t.dtype] = min(low, first), max(high, first + num_stored(t))
    flats = {
        key: torch.zeros(high - low, dtype=dtype or key[1], device=_device_of(key, tensors))
        for key, (low, high) in spans.items()
    }
    if fill:
        for flat in flats.values():
            flat.fill_(fill)
    return [
        flats[storage_key(t), t.dtype].as_strided(
            t.shape, t.stride(), int(t.storage_offset()) - spans[storage_key(t), t.dtype][0]
        )
        for t in tensors
    ]


def _device_of(key: tuple[int, torch.dtype], tensors: list[torch.Tensor]) -> torch.device:
    return next(t.device for t in tensors if (storage_key(t), t.dtype) == key)
