"""The tensors of a torch module by checkpoint name, live: a replaced parameter is seen at the next access."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch.distributed.tensor import DTensor

from wbridge.discovery.names import normalize_names


class LiveTensors(Mapping[str, torch.Tensor]):
    """The tensors of a module, read from the module at each access: the very objects that it uses."""

    def __init__(self, module: torch.nn.Module, paths: Mapping[str, str]) -> None:
        """`paths` gives each name's attribute path in `module`."""
        self.paths: Mapping[str, str] = dict(paths)
        self._module = module

    def __getitem__(self, name: str) -> torch.Tensor:
        owner, _, attribute = self.paths[name].rpartition(".")
        tensor: torch.Tensor = getattr(self._module.get_submodule(owner), attribute)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.paths)

    def __len__(self) -> int:
        return len(self.paths)


class LocalShards(Mapping[str, torch.Tensor]):
    """This rank's part of each of them, to read.

    While FSDP has whole parameters in the module, between a forward and a backward pass say, the part is
    that of the parameter which it puts back afterwards.
    """

    def __init__(self, tensors: LiveTensors) -> None:
        self._tensors = tensors
        self._sharded = {name: t for name in tensors if isinstance(t := tensors[name], DTensor)}

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor, sharded = self._tensors[name], self._sharded.get(name)
        if sharded is not None and getattr(tensor, "placements", None) != sharded.placements:
            tensor = sharded
        return local_tensor(tensor)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of `tensor`, without padding and without a copy."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def state_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter and persistent buffer by its path; a tied one under each of its paths."""
    tensors: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    for prefix, child in module.named_modules(remove_duplicate=False):
        for name, buffer in child.named_buffers(recurse=False, remove_duplicate=False):
            if name not in child._non_persistent_buffers_set:
                tensors[f"{prefix}.{name}" if prefix else name] = buffer
    return tensors


def named_state(module: torch.nn.Module) -> tuple[dict[str, torch.Tensor], LiveTensors]:
    """Return the tensors of `state_tensors` without wrappers' prefixes, and the live view of them.

    Raises:
        LayoutError: two names become one when the prefixes are taken off.
    """
    tensors = state_tensors(module)
    names = normalize_names(tensors)
    live = LiveTensors(module, {names[path]: path for path in tensors})
    return {names[path]: tensor for path, tensor in tensors.items()}, live
