"""Destinations must alias live storage: remember where each parameter lies, and notice when it moves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from wbridge.discovery.places import place_of, places_of
from wbridge.errors import LayoutError

_SHOWN = 5
_STORAGE = "its storage was replaced"
_OBJECT = "its parameter object was replaced"


class Owner(NamedTuple):
    """Where the current tensor of a name is found: `getattr(object, attribute)`."""

    object: object
    attribute: str


class Bindings:
    """Where the live tensors of a worker were when they were bound."""

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], names: Iterable[str], owners: Mapping[str, Owner]
    ) -> None:
        self._parameters = parameters
        self._owners = owners
        self._tensors = {name: parameters[name] for name in names}
        self._next = 0
        self._befores = {name: place_of(tensor) for name, tensor in self._tensors.items()}
        self._places = places_of(tuple(self._tensors), list(self._tensors.values()))

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __len__(self) -> int:
        return len(self._tensors)

    def check(self) -> None:
        """Return if every tensor is where it was.

        Raises:
            LayoutError: some were replaced, moved or reshaped; the message names them and says how.
        """
        if moved := self._moved(0, len(self._tensors)):
            raise LayoutError(
                f"{moved} no longer alias the live parameters. Updates would go to dead memory: bind and "
                "discover after the step that replaces parameters, or keep it from replacing them"
            )

    def check_some(self, count: int) -> None:
        """`check` of a source, `count` tensors a call, in turn: what moves all of them is noticed at once.

        Raises:
            LayoutError: as `check`.
        """
        end = self._next + count
        if moved := self._moved(self._next, end):
            raise LayoutError(
                f"{moved} are not where they were when this epoch began. What they left there would be sent: "
                "write into parameters instead of replacing them, or let all ranks call reconfigure(mode=...)"
                " after that, with the mode they have, which takes them where they are"
            )
        self._next = end if end < len(self._tensors) else 0

    def _moved(self, begin: int, end: int) -> str:
        """Name which of these have moved, and how, as the begin of an error; nothing if none has."""
        if self._owners:
            suspects = list(self._tensors)[begin:end]
        else:
            with torch.no_grad():
                suspects = self._places.moved(self._parameters, begin, end)
        moved = [f"{name}: {how}" for name in suspects if (how := self._how_moved(name))]
        if not moved:
            return ""
        rest = f" and {len(moved) - _SHOWN} more" if len(moved) > _SHOWN else ""
        return f"{len(moved)} of {len(self._tensors)} tensors ({'; '.join(moved[:_SHOWN])}{rest})"

    def bind_again(self) -> Bindings:
        """Remember where the same parameters lie now, of a mapping that shows replaced ones.

        Raises:
            LayoutError: some are gone, or have another shape, dtype or strides; the message names them.
        """
        hows = {name: self._how_moved(name) for name in self._tensors}
        changed = [f"{name}: {how}" for name, how in hows.items() if how not in ("", _STORAGE, _OBJECT)]
        if changed:
            rest = f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
            raise LayoutError(
                f"{len(changed)} of {len(self._tensors)} parameters are not laid out as before: "
                f"{'; '.join(changed[:_SHOWN])}{rest}; close this adapter, and connect with a new one"
            )
        return Bindings(self._parameters, self._tensors, self._owners)

    def _how_moved(self, name: str) -> str:
        owner, before = self._owners.get(name), self._befores[name]
        found = getattr(owner.object, owner.attribute, None) if owner else self._parameters.get(name)
        if not isinstance(found, torch.Tensor):
            return "deleted"
        now = place_of(found)
        if now.shape != before.shape:
            return f"shape {before.shape} became {now.shape}"
        if now.dtype != before.dtype:
            return f"dtype {before.dtype} became {now.dtype}"
        if now.strides != before.strides:
            return f"strides {before.strides} became {now.strides}"
        if now.address != before.address:
            return _STORAGE
        if owner and found is not self._tensors[name]:
            return _OBJECT
        return ""


def bind(
    parameters: Mapping[str, torch.Tensor],
    owners: Mapping[str, Owner] | None = None,
    *,
    names: Iterable[str] | None = None,
) -> Bindings:
    """Remember where each parameter lies now (or those of `names`).

    `parameters` is read again at each check, so a mapping that looks the tensors up in a module shows
    replaced ones. For a plain dict, `owners` says where the framework looks; see `owners_of`.
    """
    return Bindings(parameters, parameters if names is None else names, owners or {})


def owners_of(module: torch.nn.Module, names: Mapping[str, torch.Tensor]) -> dict[str, Owner]:
    """Find the submodule and attribute behind each dotted name of `module`; unknown names are left out."""
    modules = dict(module.named_modules(remove_duplicate=False))
    owners = {}
    for name in names:
        path, _, attribute = name.rpartition(".")
        if path in modules and hasattr(modules[path], attribute):
            owners[name] = Owner(modules[path], attribute)
    return owners
