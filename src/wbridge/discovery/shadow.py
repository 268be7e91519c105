"""Other memory in place of live tensors while a loader really runs, so that it cannot touch the weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any  # operator arguments and results are whatever the loader uses

import torch

from wbridge.discovery.traced import Key, Traced, is_view, replaced, storage_key, tensors_in
from wbridge.errors import LayoutError


class Shadows:
    """Runs a loader's operators so that they use shadows wherever they are given memory of these tensors.

    The loader keeps its own tensor objects, stale views included; views of live memory are made as
    usual, and only what would touch their elements is sent to the shadow of the same geometry.
    """

    def __init__(
        self, live: Iterable[torch.Tensor], *, fill: int = 0, dtype: torch.dtype | None = None
    ) -> None:
        """Fill the shadows with `fill`.

        With an integer `dtype` all shadows hold that, and so do its casts to floating point: numbers
        that a probe sends through the loader survive them.
        """
        self._dtype = dtype
        self._flat: dict[Key, torch.Tensor] = {}
        for tensor in live:
            key = (storage_key(tensor), tensor.dtype)
            if key not in self._flat:
                size = tensor.untyped_storage().nbytes() // tensor.itemsize
                self._flat[key] = torch.zeros(size, dtype=dtype or tensor.dtype, device=tensor.device)
                if fill:
                    self._flat[key].fill_(fill)
        self._storages = {storage for storage, _ in self._flat}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the shadow of a live tensor or of a view of one.

        Raises:
            LayoutError: the view has another dtype than the tensors in that storage.
        """
        flat = self._flat.get((storage_key(tensor), tensor.dtype))
        if flat is None:
            raise LayoutError(
                f"load_weights reads parameter memory as {tensor.dtype}, which is not the parameter's dtype; "
                "use method='trace'"
            )
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def carry(self, tensor: torch.Tensor) -> Carried:
        """Wrap a weight so that whatever a loader does with it, in any thread, uses the shadows."""
        return Carried(tensor, self)

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Execute one operator."""
        if func is torch.ops.aten._to_copy.default and args[0].dtype is self._dtype:
            kwargs = {name: value for name, value in kwargs.items() if name != "dtype"}
        tensors = list(tensors_in(args, kwargs))
        is_carried = any(isinstance(tensor, Carried) for tensor in tensors)
        if not is_carried and not any(storage_key(tensor) in self._storages for tensor in tensors):
            return func(*args, **kwargs)  # most operators of a sampled replay
        originals: dict[int, torch.Tensor] = {}

        def enter(tensor: torch.Tensor) -> torch.Tensor:
            used = tensor.held if isinstance(tensor, Carried) else tensor
            if storage_key(used) in self._storages and not is_view(func):
                used = self.of(used)
            if used is not tensor:
                originals[id(used)] = tensor
            return used

        def leave(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) in originals:
                return originals[id(tensor)]
            return self.carry(tensor) if is_carried and not isinstance(tensor, Traced) else tensor

        return replaced(func(*replaced(args, enter), **replaced(kwargs, enter)), leave)


class Carried(torch.Tensor):
    """A real tensor whose operators run through shadows."""

    held: torch.Tensor
    shadows: Shadows

    @staticmethod
    def __new__(cls, held: torch.Tensor, shadows: Shadows) -> Carried:
        made: Carried = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=held.device,
        )
        made.held, made.shadows = held, shadows
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]  # torch's is untyped
        return f"Carried({self.held!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub lacks `func`
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        carried = next(t for t in tensors_in(args, kwargs or {}) if isinstance(t, Carried))
        return carried.shadows.run(func, args, kwargs or {})
