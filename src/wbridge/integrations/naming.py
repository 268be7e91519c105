"""Checkpoint names: wrappers' prefixes taken off parameter names, and specs of plain tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from wbridge.errors import LayoutError
from wbridge.layout.source_map import TensorSpec

WRAPPER_SEGMENTS = frozenset(
    {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module", "_flat_param"}
)
"""Path segments that torch's wrappers add anywhere in a name."""

WRAPPER_PREFIXES = frozenset({"module"}) | WRAPPER_SEGMENTS
"""Segments that wrap a whole model; `module` may be a real attribute further down."""


def checkpoint_name(name: str) -> str:
    """Return `name` without the segments that wrappers (compile, DDP, FSDP) added, however nested."""
    segments = name.split(".")
    while len(segments) > 1 and segments[0] in WRAPPER_PREFIXES:
        segments = segments[1:]
    return ".".join(s for i, s in enumerate(segments) if s not in WRAPPER_SEGMENTS or i == len(segments) - 1)


def checkpoint_names(names: Iterable[str]) -> dict[str, str]:
    """Return {name: checkpoint name}.

    Raises:
        LayoutError: two names become one when the wrappers' prefixes are taken off.
    """
    result: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name in names:
        clean = checkpoint_name(name)
        if clean in taken:
            raise LayoutError(
                f"parameters {taken[clean]!r} and {name!r} would both be checkpoint tensor {clean!r}; "
                "rename one of the modules, or describe the worker with an explicit source map"
            )
        taken[clean] = name
        result[name] = clean
    return result


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of `dtype` without `torch.`."""
    return str(dtype).removeprefix("torch.")


def tensor_spec(tensor: torch.Tensor) -> TensorSpec:
    """Return the global shape and dtype of `tensor` (a DTensor's shape is global)."""
    return TensorSpec(shape=tuple(tensor.shape), dtype=dtype_name(tensor.dtype))


def row_major(shape: Iterable[int]) -> tuple[int, ...]:
    """Return the strides in elements of a contiguous tensor of this shape."""
    strides: list[int] = []
    step = 1
    for n in reversed(tuple(shape)):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def state_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter and persistent buffer of `module` by its name; a tied one under each name."""
    tensors: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    for prefix, child in module.named_modules(remove_duplicate=False):
        for name, buffer in child.named_buffers(recurse=False, remove_duplicate=False):
            if name not in child._non_persistent_buffers_set:
                tensors[f"{prefix}.{name}" if prefix else name] = buffer
    return tensors
