"""Region algebra: normalize, intersect, subtract, split, divide.

Slices, steps, transposes, reshapes, replication and interleaves give O(1) parts, never one per row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from wbridge.errors import LayoutError
from wbridge.layout.nest import Loop, Nest, source_nest, target_nest
from wbridge.layout.region import Overlap, Region, Strided
from wbridge.layout.sets import Match, distinct, match, minus

Side = Literal["source", "target"]


def normalize(region: Region) -> Region:
    """Return the one way to write this pairing of source and target elements as loops.

    No loop of extent 1, contiguous loops merged, positive source strides in descending order,
    replicating loops last.
    """
    nest, repeats = source_nest(region)
    return _region(nest, (*nest.loops, *repeats))


def intersect(left: Region, right: Region) -> tuple[Overlap, ...]:
    """Return the elements of `right` that `left` also holds, each exactly once, in few loop nests.

    Where `left` holds an element several times, one of them is used. Where `right` does, each is
    listed, by loops with stride 0 in `source` and `left`.

    Raises:
        LayoutError: `left` repeats elements in a way too irregular to tell them apart.
    """
    a, _ = source_nest(left)
    b, repeats = source_nest(right)
    if a.key > b.last or b.key > a.last:
        return ()
    return tuple(_overlap(m, repeats) for part in distinct(a) for m in match(part, b))


def subtract(region: Region, holes: Iterable[Region], side: Side) -> tuple[Region, ...]:
    """Return the part of `region` whose elements on `side` lie in none of `holes`, as normal regions.

    By "source": what remains to be had from others. By "target": what remains unwritten.

    Raises:
        LayoutError: a hole repeats elements in a way too irregular to tell them apart.
    """
    build = source_nest if side == "source" else target_nest
    whole, repeats = build(region)
    rest = [whole]
    for hole in holes:
        b, _ = build(hole)
        if all(b.key > a.last or a.key > b.last for a in rest):
            continue
        for part in distinct(b):
            rest = [remainder for a in rest for remainder in minus(a, part)]
    if side == "source":
        return tuple(normalize(_region(a, (*a.loops, *repeats))) for a in rest)
    return tuple(normalize(_swapped(_region(a, (*a.loops, *repeats)))) for a in rest)


def split(overlap: Overlap, max_elements: int) -> tuple[Overlap, ...]:
    """Cut an overlap into consecutive parts of at most `max_elements` wire elements each.

    Outer loops are cut first, into parts of nearly equal size; replicating loops stay whole.
    """
    if max_elements < 1:
        raise LayoutError(f"a part must hold at least one element, not {max_elements}")
    return tuple(_iter_parts(overlap, max_elements, 0))


def divide(overlap: Overlap, num_parts: int) -> tuple[Overlap, ...]:
    """Cut an overlap into `num_parts` parts of nearly equal size, or fewer when it is too small."""
    if num_parts < 1:
        raise LayoutError(f"an overlap divides into at least one part, not {num_parts}")
    wire_loops = [k for k, s in enumerate(overlap.source.strides) if s and overlap.extents[k] > 1]
    if num_parts == 1 or not wire_loops:
        return (overlap,)
    for excess_percent in (10, None):  # the outermost loop that divides well keeps parts contiguous
        for k in wire_loops:
            n = overlap.extents[k]
            largest = -(-n // num_parts)
            if n >= num_parts and (
                excess_percent is None or largest * num_parts * 100 <= n * (100 + excess_percent)
            ):
                return tuple(_cut_loop(overlap, k, num_parts))
    k = wire_loops[0]
    n = overlap.extents[k]
    shares = [num_parts * (i + 1) // n - num_parts * i // n for i in range(n)]
    return tuple(
        part for i, share in enumerate(shares) for part in divide(_window(overlap, k, i, i + 1), share)
    )


def _iter_parts(overlap: Overlap, max_elements: int, loop_index: int) -> Iterator[Overlap]:
    wire = overlap.num_wire_elements
    if wire <= max_elements:
        yield overlap
        return
    n = overlap.extents[loop_index]
    if not overlap.source.strides[loop_index] or n == 1:
        yield from _iter_parts(overlap, max_elements, loop_index + 1)
        return
    inner = wire // n
    if inner <= max_elements:
        yield from _cut_loop(overlap, loop_index, -(-n // (max_elements // inner)))
        return
    for i in range(n):  # the loop is gone from each part, so the next has its index
        yield from _iter_parts(_window(overlap, loop_index, i, i + 1), max_elements, loop_index)


def _cut_loop(overlap: Overlap, loop_index: int, num_parts: int) -> Iterator[Overlap]:
    n = overlap.extents[loop_index]
    for i in range(num_parts):
        yield _window(overlap, loop_index, n * i // num_parts, n * (i + 1) // num_parts)


def _window(overlap: Overlap, loop_index: int, start: int, stop: int) -> Overlap:
    """Return iterations [start, stop) of one loop; a single iteration drops the loop."""
    k, count = loop_index, stop - start

    def windowed(side: Strided) -> Strided:
        strides = side.strides if count > 1 else side.strides[:k] + side.strides[k + 1 :]
        return Strided(side.offset + start * side.strides[k], strides)

    extents = overlap.extents[:k] + ((count,) if count > 1 else ()) + overlap.extents[k + 1 :]
    return Overlap(extents, windowed(overlap.source), windowed(overlap.left), windowed(overlap.right))


def _region(nest: Nest, loops: tuple[Loop, ...]) -> Region:
    return Region(
        tuple([n for n, _, _ in loops]),
        Strided(nest.key, tuple([s for _, s, _ in loops])),
        Strided(nest.carried, tuple([t for _, _, t in loops])),
    )


def _swapped(region: Region) -> Region:
    return Region(region.extents, source=region.target, target=region.source)


def _overlap(found: Match, repeats: tuple[Loop, ...]) -> Overlap:
    loops: list[tuple[int, int, int, int]] = []
    for n, s, t, u in sorted(found.loops, key=_by_descending_source):
        if loops:
            outer, outer_s, outer_t, outer_u = loops[-1]
            if outer_s == n * s and outer_t == n * t and outer_u == n * u:
                loops[-1] = (outer * n, s, t, u)
                continue
        loops.append((n, s, t, u))
    loops += [(n, 0, 0, u) for n, _, u in repeats]
    return Overlap(
        tuple([n for n, _, _, _ in loops]),
        Strided(found.key, tuple([s for _, s, _, _ in loops])),
        Strided(found.left, tuple([t for _, _, t, _ in loops])),
        Strided(found.right, tuple([u for _, _, _, u in loops])),
    )


def _by_descending_source(loop: tuple[int, int, int, int]) -> int:
    return -loop[1]
