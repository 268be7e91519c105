"""Random regions made by chains of views, and their elements one by one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from hypothesis import strategies as st

from wbridge.layout.region import Region, Strided


def elements(extents: tuple[int, ...], *sides: Strided) -> Iterator[tuple[int, ...]]:
    """Yield the offsets of each element on all sides."""
    for index in itertools.product(*map(range, extents)):
        yield tuple(
            side.offset + sum(i * s for i, s in zip(index, side.strides, strict=True)) for side in sides
        )


def pairs(region: Region) -> list[tuple[int, ...]]:
    return list(elements(region.extents, region.source, region.target))


def row_major(shape: tuple[int, ...], pad: int = 0) -> tuple[int, ...]:
    """Return the strides of a tensor whose every row of each dim is `pad` elements longer than needed."""
    strides: list[int] = []
    step = 1
    for n in reversed(shape):
        strides.insert(0, step)
        step = step * n + pad
    return tuple(strides)


class _View:
    """A strided view that grows by one operation at a time, as torch's would."""

    def __init__(self, num_elements: int) -> None:
        self.offset, self.shape, self.strides = 0, [num_elements], [1]

    def apply(self, draw: st.DrawFn, operation: str) -> None:
        if self.shape or operation == "expand":
            getattr(self, operation)(draw)

    def slice(self, draw: st.DrawFn) -> None:
        dim = draw(st.integers(0, len(self.shape) - 1))
        start = draw(st.integers(0, self.shape[dim] - 1))
        stop = draw(st.integers(start + 1, self.shape[dim]))
        step = draw(st.sampled_from([1, 1, 2, 3]))
        self.offset += start * self.strides[dim]
        self.shape[dim] = -(-(stop - start) // step)
        self.strides[dim] *= step

    def flip(self, draw: st.DrawFn) -> None:
        dim = draw(st.integers(0, len(self.shape) - 1))
        self.offset += (self.shape[dim] - 1) * self.strides[dim]
        self.strides[dim] *= -1

    def split(self, draw: st.DrawFn) -> None:
        dim = draw(st.integers(0, len(self.shape) - 1))
        n, s = self.shape[dim], self.strides[dim]
        inner = draw(st.sampled_from([k for k in range(1, n + 1) if n % k == 0]))
        self.shape[dim : dim + 1] = [n // inner, inner]
        self.strides[dim : dim + 1] = [inner * s, s]

    def merge(self, draw: st.DrawFn) -> None:
        for dim in range(len(self.shape) - 1):
            if self.strides[dim] == self.shape[dim + 1] * self.strides[dim + 1]:
                self.shape[dim : dim + 2] = [self.shape[dim] * self.shape[dim + 1]]
                self.strides[dim : dim + 2] = [self.strides[dim + 1]]
                return

    def permute(self, draw: st.DrawFn) -> None:
        order = draw(st.permutations(range(len(self.shape))))
        self.shape = [self.shape[k] for k in order]
        self.strides = [self.strides[k] for k in order]

    def select(self, draw: st.DrawFn) -> None:
        dim = draw(st.integers(0, len(self.shape) - 1))
        self.offset += draw(st.integers(0, self.shape[dim] - 1)) * self.strides[dim]
        del self.shape[dim], self.strides[dim]

    def expand(self, draw: st.DrawFn) -> None:
        dim = draw(st.integers(0, len(self.shape)))
        self.shape.insert(dim, draw(st.sampled_from([1, 1, 2])))
        self.strides.insert(dim, 0)


OPERATIONS = ("slice", "split", "permute", "slice", "split", "permute", "merge", "select", "expand")


@st.composite
def views(
    draw: st.DrawFn, num_elements: int, operations: tuple[str, ...] = OPERATIONS
) -> tuple[tuple[int, ...], Strided]:
    """Return extents and strides of a view of `num_elements` contiguous elements."""
    view = _View(num_elements)
    for operation in draw(st.lists(st.sampled_from(operations), max_size=6)):
        view.apply(draw, operation)
    return tuple(view.shape), Strided(view.offset, tuple(view.strides))


@st.composite
def regions(
    draw: st.DrawFn, num_elements: int, operations: tuple[str, ...] = (*OPERATIONS, "flip")
) -> Region:
    """Return a view of a checkpoint tensor held by a parameter with padded rows, in any order of its dims."""
    extents, source = draw(views(num_elements, operations))
    strides = row_major(extents, draw(st.sampled_from([0, 0, 1, 3])))
    order = draw(st.permutations(range(len(extents))))
    target = Strided(draw(st.integers(0, 9)), tuple(strides[k] for k in order))
    return Region(
        tuple(extents[k] for k in order),
        Strided(source.offset, tuple(source.strides[k] for k in order)),
        target,
    )


SIZES = st.sampled_from([1, 12, 24, 36, 60, 64, 90])


@st.composite
def region_pairs(draw: st.DrawFn) -> tuple[Region, Region]:
    num_elements = draw(SIZES)
    return draw(regions(num_elements)), draw(regions(num_elements))
