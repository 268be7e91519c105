"""Nest: a set of integers written as loops, with a second offset carried along.

The algebra matches two sets by their *key* (the checkpoint element, or the parameter element) while
the *carried* side says where each key lies on the other side of its region.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from wbridge.layout.region import Region, Strided

Loop = tuple[int, int, int]
"""Extent (> 1), key stride (> 0), carried stride."""


class Nest(NamedTuple):
    """Loops by descending key stride over keys `key + sum(i * stride)`."""

    key: int
    carried: int
    loops: tuple[Loop, ...] = ()

    @property
    def last(self) -> int:
        """The largest key."""
        last = self.key
        for n, s, _ in self.loops:
            last += (n - 1) * s
        return last

    @property
    def size(self) -> int:
        """Keys, counted as often as they occur."""
        return math.prod(n for n, _, _ in self.loops)

    @property
    def is_nested(self) -> bool:
        """Whether each loop steps over everything inside it; then no key occurs twice."""
        span = 0
        for n, s, _ in reversed(self.loops):
            if s <= span:
                return False
            span += (n - 1) * s
        return True

    def iterations(self, loop_index: int) -> Iterator[Nest]:
        """Yield this nest at each index of one loop."""
        n, s, t = self.loops[loop_index]
        rest = self.loops[:loop_index] + self.loops[loop_index + 1 :]
        for i in range(n):
            yield Nest(self.key + i * s, self.carried + i * t, rest)


def build_nest(extents: tuple[int, ...], key: Strided, carried: Strided) -> tuple[Nest, tuple[Loop, ...]]:
    """Return the keys of a region as a nest, and its loops that repeat them (key stride 0)."""
    key_offset, carried_offset = key.offset, carried.offset
    loops: list[Loop] = []
    repeats: list[Loop] = []
    for n, s, t in zip(extents, key.strides, carried.strides, strict=True):
        if n == 1:
            continue
        if s < 0:  # walk the other way
            key_offset += (n - 1) * s
            carried_offset += (n - 1) * t
            s, t = -s, -t
        if s:
            loops.append((n, s, t))
            continue
        if t < 0:
            carried_offset += (n - 1) * t
            t = -t
        repeats.append((n, 0, t))
    return Nest(key_offset, carried_offset, _merged(loops)), _merged(repeats)


def descending(loop: Loop) -> tuple[int, int]:
    return -loop[1], -loop[2]


def _merged(loops: list[Loop]) -> tuple[Loop, ...]:
    """Order loops by descending stride and join those that are contiguous on both sides."""
    if len(loops) < 2:
        return tuple(loops)
    loops.sort(key=descending)
    merged = loops[:1]
    for n, s, t in loops[1:]:
        outer, outer_s, outer_t = merged[-1]
        if outer_s == n * s and outer_t == n * t:
            merged[-1] = (outer * n, s, t)
        else:
            merged.append((n, s, t))
    return tuple(merged)


def source_nest(region: Region) -> tuple[Nest, tuple[Loop, ...]]:
    return build_nest(region.extents, region.source, region.target)


def target_nest(region: Region) -> tuple[Nest, tuple[Loop, ...]]:
    return build_nest(region.extents, region.target, region.source)
