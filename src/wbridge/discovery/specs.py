"""What a tensor is, in words that need no torch: specs of checkpoint tensors and of live tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from wbridge.errors import LayoutError
from wbridge.layout.dtype import ITEMSIZE
from wbridge.layout.source_map import ParameterSpec, TensorSpec


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype without `torch.`."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of that name.

    Raises:
        LayoutError: torch has no such dtype, or its elements are smaller than a byte.
    """
    dtype = getattr(torch, name, None) if name in ITEMSIZE else None
    if not isinstance(dtype, torch.dtype):
        raise LayoutError(f"dtype {name!r} is not supported; use one of {', '.join(sorted(ITEMSIZE))}")
    return dtype


def tensor_spec(tensor: torch.Tensor) -> TensorSpec:
    """Describe a tensor as a checkpoint tensor: its shape is the global one."""
    return TensorSpec(tuple(tensor.shape), dtype_name(tensor.dtype))


def parameter_spec(tensor: torch.Tensor) -> ParameterSpec:
    """Describe a live tensor of this worker: its local shape and its strides."""
    return ParameterSpec(tuple(tensor.shape), tuple(tensor.stride()), dtype_name(tensor.dtype))


def specs_of(state_dict: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    """Describe a whole state dict as a checkpoint; every tensor must have its global shape."""
    return {name: tensor_spec(tensor) for name, tensor in state_dict.items()}


def row_major(spec: TensorSpec) -> ParameterSpec:
    """Describe a contiguous live tensor of the same shape and dtype."""
    return ParameterSpec(spec.shape, tuple(torch.empty(spec.shape, device="meta").stride()), spec.dtype)
