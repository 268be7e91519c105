"""Region: a strided index set of a checkpoint tensor paired with the strided view that holds it."""

from __future__ import annotations

import math

import msgspec

from wbridge.errors import LayoutError


class Strided(msgspec.Struct, frozen=True):
    """Where the element at loop index (i0, i1, ...) lies: `offset + sum(i_k * strides[k])`, in elements."""

    offset: int
    strides: tuple[int, ...]


class Region(msgspec.Struct, frozen=True):
    """Elements of one checkpoint tensor and the parameter elements that hold them, loop by loop.

    `source` counts elements of the checkpoint tensor in row-major order. `target` counts elements
    from the parameter's first element (its `data_ptr`). A loop with source stride 0 replicates.
    A 0-d scalar has no loops and one element. A region is never empty.
    """

    extents: tuple[int, ...]
    source: Strided
    target: Strided

    def __post_init__(self) -> None:
        if not len(self.extents) == len(self.source.strides) == len(self.target.strides):
            raise LayoutError(f"region loops do not match: {self}")
        if any(n < 1 for n in self.extents):
            raise LayoutError(f"region {self.extents} is empty; leave empty regions out")

    @property
    def num_elements(self) -> int:
        """Parameter elements in this region, replicated ones counted each time."""
        return math.prod(self.extents)


class Overlap(msgspec.Struct, frozen=True):
    """The elements that two regions of one checkpoint tensor share, as a common loop nest.

    `left` and `right` are the target sides of the two regions. A loop in which `right` replicates
    has stride 0 in `source` and `left`.
    """

    extents: tuple[int, ...]
    source: Strided
    left: Strided
    right: Strided

    @property
    def num_wire_elements(self) -> int:
        """Distinct checkpoint elements: what travels."""
        return math.prod(n for n, s in zip(self.extents, self.source.strides, strict=True) if s or n == 1)

    @property
    def left_region(self) -> Region:
        """These elements as the left side holds them."""
        return Region(self.extents, self.source, self.left)

    @property
    def right_region(self) -> Region:
        """These elements as the right side holds them."""
        return Region(self.extents, self.source, self.right)
