"""Destinations: the live tensors that an update writes, and what the backend does when they are written."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import cast

import torch

from wbridge.discovery.pointers import Bindings, bind
from wbridge.layout.source_map import ASSEMBLED, SourceMap

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], object]


class Destinations:
    """The tensors that slots are scattered into: live parameters, and checkpoint tensors assembled for
    the backend's own loader where it computes instead of copying."""

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        source_map: SourceMap,
    ) -> None:
        self._assembled = {
            name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))
            for name, spec in source_map.parameters.items()
            if name.startswith(ASSEMBLED)
        }
        self._names = tuple(n for n in source_map.parameters if n not in self._assembled)
        self._opaque = source_map.opaque
        # Most loaders feed no buffers, and a dict is looked at without Python for each name.
        self._live = parameters if all(n in parameters for n in self._names) else _both(parameters, buffers)
        self._bindings: Bindings = bind(self._live, names=self._names)
        self.tensors: dict[str, torch.Tensor] = {}
        """Every tensor that the plan may name, by its name in the plan; other ones after `rebinding`."""
        self._find()

    def _find(self) -> None:
        self.tensors.update({name: self._live[name] for name in self._names} | self._assembled)

    def check(self) -> None:
        """Return if every destination is where it was when the plan was made.

        Raises:
            LayoutError: one was replaced or moved; names it.
        """
        self._bindings.check()

    @contextmanager
    def rebinding(self) -> Iterator[None]:
        """Take the parameters where they are now, unless what is done inside fails.

        Raises:
            LayoutError: one is gone, or has another shape, dtype or strides than before; names it.
        """
        bindings, before = self._bindings.bind_again(), dict(self.tensors)
        self._find()
        try:
            yield
        except BaseException:  # whatever it is, nothing takes what was found for bound; raised again
            self.tensors.update(before)
            raise
        self._bindings = bindings

    @property
    def has_assembled(self) -> bool:
        """Whether tensors are handed to the backend's loader by `finish`."""
        return bool(self._assembled)

    def finish(self, load_assembled: LoadWeights | None, after_apply: Callable[[], None] | None) -> None:
        """Run what the backend does after its parameters are written, in the calling thread."""
        if self._assembled and load_assembled is not None:
            with torch.no_grad():
                load_assembled((n.removeprefix(ASSEMBLED), t) for n, t in self._assembled.items())
        if after_apply is not None:
            after_apply()


def _both(
    first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    """The two as one, which shows what is replaced in either."""
    return ChainMap(cast("dict[str, torch.Tensor]", first), cast("dict[str, torch.Tensor]", second))
