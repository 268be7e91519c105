"""Intersect and subtract regions without looking at single elements.

Both nests are cut at a common stride into high and low digits; the digits are matched one by one, and
what remains are pairs of arithmetic progressions. Strides that fit no common cut cost one loop unrolled:
more overlaps, never wrong ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd
from typing import Literal, NamedTuple

from wbridge.errors import LayoutError
from wbridge.layout.nest import Nest, build_nest, choose_radix, cut, source_nest, target_nest
from wbridge.layout.region import Overlap, Region, Strided

Side = Literal["source", "target"]

MAX_UNROLLED = 1024
"""Iterations that may be unrolled to find the distinct elements of a region that repeats some."""


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
    matches = [m for part in _distinct(a) for m in _match(part, b)]
    return tuple(_overlap(m, repeats) for m in matches)


def subtract(region: Region, holes: Iterable[Region], side: Side) -> tuple[Region, ...]:
    """Return the part of `region` whose elements on `side` lie in none of `holes`.

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
        for part in _distinct(b):
            rest = [remainder for a in rest for remainder in _minus(a, part)]
    return tuple(_region(a, repeats, side) for a in rest)


class _Match(NamedTuple):
    """Common keys of two nests: loops of (extent, key stride, left stride, right stride)."""

    key: int
    left: int
    right: int
    loops: tuple[tuple[int, int, int, int], ...]


def _match(a: Nest, b: Nest) -> list[_Match]:
    if a.key > b.last or b.key > a.last:
        return []
    if len(a.loops) < 2 and len(b.loops) < 2:
        return _match_progressions(a, b)
    radix = choose_radix(a, b)
    if not radix:
        in_a, index = _shortest_loop(a, b)
        if in_a:
            return [m for part in a.iterations(index) for m in _match(part, b)]
        return [m for part in b.iterations(index) for m in _match(a, part)]
    matches = []
    pieces = cut(b, radix)
    for a_high, a_low in cut(a, radix):
        for b_high, b_low in pieces:
            highs = _match(a_high, b_high)
            lows = _match(a_low, b_low) if highs else []
            matches += [_joined(high, low) for high in highs for low in lows]
    return matches


def _joined(high: _Match, low: _Match) -> _Match:
    return _Match(high.key + low.key, high.left + low.left, high.right + low.right, high.loops + low.loops)


def _shortest_loop(a: Nest, b: Nest) -> tuple[bool, int]:
    candidates = [(n, 0, k) for k, (n, _, _) in enumerate(a.loops)]
    candidates += [(n, 1, k) for k, (n, _, _) in enumerate(b.loops)]
    _, which, index = min(candidates)
    return which == 0, index


class _Meeting(NamedTuple):
    """Where two progressions meet: from these indices, `count` times, this far apart."""

    a_index: int
    a_step: int
    b_index: int
    b_step: int
    count: int


def _meet(a: Nest, b: Nest) -> _Meeting | None:
    """Solve `a.key + i * s == b.key + j * t` for nests of at most one loop."""
    n, s = a.loops[0][:2] if a.loops else (1, 0)
    m, t = b.loops[0][:2] if b.loops else (1, 0)
    s, t = s or t or 1, t or s or 1
    delta = b.key - a.key
    common = gcd(s, t)
    if delta % common:
        return None
    a_step, b_step = t // common, s // common
    phase = delta // common * pow(b_step, -1, a_step) % a_step if a_step > 1 else 0
    low = max(0, -(-delta // s))
    first = low + (phase - low) % a_step
    last = min(n - 1, (delta + (m - 1) * t) // s)
    if first > last:
        return None
    return _Meeting(first, a_step, (first * s - delta) // t, b_step, (last - first) // a_step + 1)


def _match_progressions(a: Nest, b: Nest) -> list[_Match]:
    found = _meet(a, b)
    if found is None:
        return []
    _, s, left = a.loops[0] if a.loops else (1, 0, 0)
    _, _, right = b.loops[0] if b.loops else (1, 0, 0)
    loops = ((found.count, s * found.a_step, left * found.a_step, right * found.b_step),)
    return [
        _Match(
            a.key + found.a_index * s,
            a.carried + found.a_index * left,
            b.carried + found.b_index * right,
            loops if found.count > 1 else (),
        )
    ]


def _minus(a: Nest, b: Nest) -> list[Nest]:
    """Return the indices of `a` whose keys are not in `b`; no key occurs twice in `b`."""
    if a.key > b.last or b.key > a.last:
        return [a]
    if len(a.loops) < 2 and len(b.loops) < 2:
        return _minus_progression(a, b)
    radix = choose_radix(a, b)
    if not radix:
        in_a, index = _shortest_loop(a, b)
        if in_a:
            return [remainder for part in a.iterations(index) for remainder in _minus(part, b)]
        rest = [a]
        for part in b.iterations(index):
            rest = [remainder for piece in rest for remainder in _minus(piece, part)]
        return rest
    remainders: list[Nest] = []
    holes = cut(b, radix)
    for product in cut(a, radix):
        products = [product]
        for hole in holes:
            products = [piece for p in products for piece in _minus_product(p, hole)]
        remainders += [Nest(h.key + w.key, h.carried + w.carried, h.loops + w.loops) for h, w in products]
    return remainders


def _minus_product(a: tuple[Nest, Nest], b: tuple[Nest, Nest]) -> list[tuple[Nest, Nest]]:
    high, low = a
    common = _match(high, b[0])
    if not common or not _match(low, b[1]):
        return [a]
    outside = [(piece, low) for piece in _minus(high, b[0])]
    beside = _minus(low, b[1])
    inside = [Nest(m.key, m.left, tuple((n, s, t) for n, s, t, _ in m.loops)) for m in common]
    return outside + [(piece, remainder) for piece in inside for remainder in beside]


def _minus_progression(a: Nest, b: Nest) -> list[Nest]:
    found = _meet(a, b)
    if found is None:
        return [a]
    if not a.loops:
        return []
    n, s, t = a.loops[0]
    step, count = found.a_step, found.count
    end = found.a_index + (count - 1) * step + 1
    if n - end >= step - 1:  # the gap after the last common element is as wide as those between
        end += step - 1
        gaps = count
    else:
        gaps = count - 1
    remainders = []
    if found.a_index:
        remainders.append((0, ((found.a_index, s, t),)))
    if step > 1 and gaps:
        remainders.append((found.a_index + 1, ((gaps, s * step, t * step), (step - 1, s, t))))
    if end < n:
        remainders.append((end, ((n - end, s, t),)))
    return [
        Nest(a.key + i * s, a.carried + i * t, tuple(loop for loop in loops if loop[0] > 1))
        for i, loops in remainders
    ]


def _distinct(nest: Nest) -> list[Nest]:
    """Return nests that together have each key of `nest` once."""
    if nest.is_nested:
        return [nest]
    index = min(range(len(nest.loops)), key=lambda k: nest.loops[k][0])
    if nest.loops[index][0] > MAX_UNROLLED:
        raise LayoutError(
            f"a region with loops {nest.loops} holds elements more than once, too irregularly to sort out; "
            "describe it by regions that do not overlap"
        )
    parts: list[Nest] = []
    for iteration in nest.iterations(index):
        fresh = _distinct(iteration)
        for part in parts:
            fresh = [remainder for piece in fresh for remainder in _minus(piece, part)]
        parts += fresh
    return parts


def _region(nest: Nest, repeats: Sequence[tuple[int, int, int]], side: Side) -> Region:
    key, carried = nest.key, nest.carried
    merged, _ = build_nest(
        tuple(n for n, _, _ in nest.loops),
        Strided(key, tuple(s for _, s, _ in nest.loops)),
        Strided(carried, tuple(t for _, _, t in nest.loops)),
    )
    loops = (*merged.loops, *repeats)
    extents = tuple(n for n, _, _ in loops)
    keys = Strided(merged.key, tuple(s for _, s, _ in loops))
    others = Strided(merged.carried, tuple(t for _, _, t in loops))
    return Region(extents, keys, others) if side == "source" else Region(extents, others, keys)


def _overlap(match: _Match, repeats: Sequence[tuple[int, int, int]]) -> Overlap:
    loops: list[tuple[int, int, int, int]] = []
    for n, s, t, u in sorted(match.loops, key=lambda loop: -loop[1]):
        if loops:
            outer, outer_s, outer_t, outer_u = loops[-1]
            if outer_s == n * s and outer_t == n * t and outer_u == n * u:
                loops[-1] = (outer * n, s, t, u)
                continue
        loops.append((n, s, t, u))
    loops += [(n, 0, 0, u) for n, _, u in repeats]
    return Overlap(
        tuple([n for n, _, _, _ in loops]),
        Strided(match.key, tuple([s for _, s, _, _ in loops])),
        Strided(match.left, tuple([t for _, _, t, _ in loops])),
        Strided(match.right, tuple([u for _, _, _, u in loops])),
    )
