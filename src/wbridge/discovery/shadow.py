"""Other memory in place of live tensors while a loader really runs, so that it cannot touch the weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any  # operator arguments and results are whatever the loader uses

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from wbridge.discovery.traced import Key, is_view, replaced, storage_key
from wbridge.errors import LayoutError


class Shadows(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__ is untyped
    """While active, operators read and write shadows wherever they are given memory of these tensors.

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
        super().__init__()  # type: ignore[no-untyped-call]  # torch's is untyped
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

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first operator imports torch._dynamo: a second and 70 MB

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_view(func):
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].dtype is self._dtype:
            kwargs = {name: value for name, value in (kwargs or {}).items() if name != "dtype"}
        originals: dict[int, torch.Tensor] = {}

        def shadow(tensor: torch.Tensor) -> torch.Tensor:
            if storage_key(tensor) not in self._storages:
                return tensor
            made = self.of(tensor)
            originals[id(made)] = tensor
            return made

        result = func(*replaced(args, shadow), **replaced(kwargs or {}, shadow))
        return replaced(result, lambda tensor: originals.get(id(tensor), tensor))
