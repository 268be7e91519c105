"""Places: where tensors lie, and which of them no longer lie there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from wbridge.native.extension import places_type, why_missing


class Place(NamedTuple):
    """What a copy that was planned for a tensor relies on."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class Places(Protocol):
    """Where some named tensors were."""

    def moved(self, parameters: Mapping[str, torch.Tensor], begin: int, end: int) -> list[str]:
        """Return the names, from number `begin` to `end`, whose tensors may lie elsewhere, or are gone."""
        ...


class PythonPlaces:
    """Asks each tensor with four calls from Python: 1.8 us, of which the extension needs a tenth."""

    def __init__(self, names: tuple[str, ...], tensors: Sequence[torch.Tensor]) -> None:
        self._places = [(name, place_of(tensor)) for name, tensor in zip(names, tensors, strict=True)]

    def moved(self, parameters: Mapping[str, torch.Tensor], begin: int, end: int) -> list[str]:
        find = parameters.get
        return [  # no Python function per tensor
            name
            for name, place in self._places[begin:end]
            if (found := find(name)) is None
            or (found.data_ptr(), found.shape, found.stride(), found.dtype) != place
        ]


def places_of(names: tuple[str, ...], tensors: Sequence[torch.Tensor]) -> Places:
    """Remember where the tensors lie now: in the extension, if it is there and torch lets it look."""
    if why_missing() is None and hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        return places_type()(torch.Tensor, names, tensors)
    return PythonPlaces(names, tensors)


def place_of(tensor: torch.Tensor) -> Place:
    return Place(tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
