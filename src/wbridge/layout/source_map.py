"""SourceMap: for one worker, which checkpoint element each parameter element holds."""

from __future__ import annotations

import msgspec

from wbridge.errors import LayoutError
from wbridge.layout.dtype import itemsize
from wbridge.layout.region import Region

ASSEMBLED = "@"
"""Prefix of a pseudo-parameter: a whole checkpoint tensor assembled for the backend's own loader."""


class TensorSpec(msgspec.Struct, frozen=True):
    """A checkpoint tensor: global shape, dtype name such as `bfloat16` (torch's name without `torch.`)."""

    shape: tuple[int, ...]
    dtype: str


class ParameterSpec(msgspec.Struct, frozen=True):
    """A live tensor of a worker: its local shape and strides in elements, and its dtype name."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


class Mapped(msgspec.Struct, frozen=True):
    """One region: elements of checkpoint tensor `tensor` held by parameter `parameter`."""

    parameter: str
    tensor: str
    region: Region


class OpaqueTarget(msgspec.Struct, frozen=True):
    """A parameter that arithmetic fills: the loader itself runs on whole checkpoint tensors.

    `tensors` must reach the loader in one call. Each appears as the pseudo-parameter
    `ASSEMBLED + tensor` in the map's parameters and regions.
    """

    parameter: str
    tensors: tuple[str, ...]
    operation: str


class SourceMap(msgspec.Struct, frozen=True):
    """What one worker holds, in checkpoint coordinates.

    `unfed` lists (parameter, elements) that no checkpoint tensor feeds; they are never written.
    `atomic` lists sets of checkpoint tensors that the loader needs in one call.
    """

    checkpoint: dict[str, TensorSpec]
    parameters: dict[str, ParameterSpec]
    mapped: tuple[Mapped, ...]
    opaque: tuple[OpaqueTarget, ...] = ()
    atomic: tuple[tuple[str, ...], ...] = ()
    unfed: tuple[tuple[str, int], ...] = ()
    method: str = "trace"

    def __post_init__(self) -> None:
        for mapped in self.mapped:
            if mapped.parameter not in self.parameters or mapped.tensor not in self.checkpoint:
                raise LayoutError(
                    f"the map pairs parameter {mapped.parameter!r} with checkpoint tensor {mapped.tensor!r}, "
                    f"but not both are among its {len(self.parameters)} parameters and "
                    f"{len(self.checkpoint)} tensors; describe the missing one or correct its name"
                )

    @property
    def num_bytes(self) -> int:
        """Parameter bytes that checkpoint tensors feed, replicated ones counted each time."""
        return sum(m.region.num_elements * itemsize(self.parameters[m.parameter].dtype) for m in self.mapped)

    def by_tensor(self) -> dict[str, tuple[Mapped, ...]]:
        """Return the regions of each checkpoint tensor that this worker holds a part of."""
        regions: dict[str, list[Mapped]] = {}
        for mapped in self.mapped:
            regions.setdefault(mapped.tensor, []).append(mapped)
        return {tensor: tuple(found) for tensor, found in regions.items()}
