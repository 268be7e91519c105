"""Destinations must alias live storage: remember where each parameter lies, and notice when it moves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from wbridge.errors import LayoutError

_SHOWN = 5


class Owner(NamedTuple):
    """Where the current tensor of a name is found: `getattr(object, attribute)`."""

    object: object
    attribute: str


class _Binding(NamedTuple):
    tensor: torch.Tensor
    owner: Owner | None
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class Bindings:
    """The live tensors of a worker and the addresses they had when they were bound."""

    def __init__(self, bound: Mapping[str, _Binding]) -> None:
        self._bound = dict(bound)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._bound[name].tensor

    def __len__(self) -> int:
        return len(self._bound)

    def check(self) -> None:
        """Return if every tensor is where it was.

        Raises:
            LayoutError: some were replaced, moved or reshaped; the message names them and says how.
        """
        moved = [f"{name}: {how}" for name, b in self._bound.items() if (how := _how_moved(b))]
        if moved:
            rest = f" and {len(moved) - _SHOWN} more" if len(moved) > _SHOWN else ""
            raise LayoutError(
                f"{len(moved)} of {len(self._bound)} destinations no longer alias the live parameters: "
                f"{'; '.join(moved[:_SHOWN])}{rest}. Updates would go to dead memory: bind and discover "
                "after the step that replaces parameters, or keep it from replacing them"
            )


def bind(parameters: Mapping[str, torch.Tensor], owners: Mapping[str, Owner] | None = None) -> Bindings:
    """Remember where each parameter lies now.

    `owners` says where the framework itself looks a parameter up, so that a replaced object is
    noticed, not only a moved storage; see `owners_of`.
    """
    owners = owners or {}
    return Bindings(
        {
            name: _Binding(t, owners.get(name), t.data_ptr(), tuple(t.shape), tuple(t.stride()), t.dtype)
            for name, t in parameters.items()
        }
    )


def owners_of(module: torch.nn.Module, names: Mapping[str, torch.Tensor]) -> dict[str, Owner]:
    """Find the submodule and attribute behind each dotted name of `module`; unknown names are left out."""
    modules = dict(module.named_modules(remove_duplicate=False))
    owners = {}
    for name in names:
        path, _, attribute = name.rpartition(".")
        if path in modules and hasattr(modules[path], attribute):
            owners[name] = Owner(modules[path], attribute)
    return owners


def _how_moved(bound: _Binding) -> str:
    current = bound.tensor
    if bound.owner is not None:
        found = getattr(bound.owner.object, bound.owner.attribute, None)
        if not isinstance(found, torch.Tensor):
            return "deleted from its module"
        current = found
    if tuple(current.shape) != bound.shape:
        return f"shape {bound.shape} became {tuple(current.shape)}"
    if current.dtype != bound.dtype:
        return f"dtype {bound.dtype} became {current.dtype}"
    if current.data_ptr() != bound.address:
        return "its storage was replaced"
    if tuple(current.stride()) != bound.strides:
        return f"strides {bound.strides} became {tuple(current.stride())}"
    if current is not bound.tensor:
        return "its parameter object was replaced"
    return ""
