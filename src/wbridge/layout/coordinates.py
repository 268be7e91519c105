"""Coordinates: where strided elements of a parameter are in the checkpoint, by a worker's own source map."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from wbridge.errors import LayoutError
from wbridge.layout.region import Region, Strided
from wbridge.layout.source_map import SourceMap


class _Nest(msgspec.Struct, frozen=True):
    """One region as (extent, parameter stride, checkpoint stride), outermost first, all forward."""

    first: int
    checkpoint: int
    loops: tuple[tuple[int, int, int], ...]

    def find(self, element: int) -> int | None:
        """Return the checkpoint index of a parameter element; None if it is not in this region."""
        rest, index = element - self.first, self.checkpoint
        if rest < 0:
            return None
        for extent, stride, step in self.loops:
            position = min(rest // stride, extent - 1)
            rest -= position * stride
            index += position * step
        return None if rest else index


class Coordinates:
    """Turns strided elements of parameters into strided elements of checkpoint tensors."""

    def __init__(self, source_map: SourceMap) -> None:
        self._nests: dict[tuple[str, str], list[_Nest]] = {}
        for mapped in source_map.mapped:
            nests = self._nests.setdefault((mapped.parameter, mapped.tensor), [])
            nests.append(_nest(mapped.region))

    def find(self, parameter: str, tensor: str, extents: Sequence[int], elements: Strided) -> Strided:
        """Return where `elements` of `parameter` are in `tensor`, counted in row-major order.

        Raises:
            LayoutError: the map says that they are not of this tensor; names it.
        """
        first = self._index(parameter, tensor, elements.offset)
        strides = tuple(
            self._index(parameter, tensor, elements.offset + stride) - first if extent > 1 else 0
            for extent, stride in zip(extents, elements.strides, strict=True)
        )
        return Strided(first, strides)

    def _index(self, parameter: str, tensor: str, element: int) -> int:
        for nest in self._nests.get((parameter, tensor), ()):
            if (index := nest.find(element)) is not None:
                return index
        raise LayoutError(
            f"{parameter}: element {element} is not of checkpoint tensor {tensor!r}, which the plan takes it"
            " for; please report it"
        )


def _nest(region: Region) -> _Nest:
    first, checkpoint = region.target.offset, region.source.offset
    loops: list[tuple[int, int, int]] = []
    for extent, step, stride in zip(
        region.extents, region.source.strides, region.target.strides, strict=True
    ):
        if extent == 1 or stride == 0:
            continue
        if stride < 0:
            first, stride = first + (extent - 1) * stride, -stride
            checkpoint, step = checkpoint + (extent - 1) * step, -step
        loops.append((extent, stride, step))
    return _Nest(first, checkpoint, tuple(sorted(loops, key=lambda loop: -loop[1])))
