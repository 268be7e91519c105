"""Match and subtract nests without looking at single elements.

Both nests are cut at a common stride into high and low digits; the digits are matched one by one, and
what remains are pairs of arithmetic progressions. Strides that fit no common cut cost one loop unrolled:
more parts, never wrong ones.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

from wbridge.errors import LayoutError
from wbridge.layout.nest import Loop, Nest
from wbridge.layout.radix import choose_radix, cut

MAX_UNROLLED = 1024
"""Iterations that may be unrolled to find the distinct keys of a nest that repeats some."""


class Match(NamedTuple):
    """Common keys of two nests: loops of (extent, key stride, left stride, right stride)."""

    key: int
    left: int
    right: int
    loops: tuple[tuple[int, int, int, int], ...]


def match(a: Nest, b: Nest) -> list[Match]:
    """Return each pair of an index of `a` and an index of `b` that have one key."""
    if a.key > b.last or b.key > a.last:
        return []
    if len(a.loops) < 2 and len(b.loops) < 2:
        return _match_progressions(a, b)
    radix = choose_radix(a, b)
    if not radix:
        in_a, index = _shortest_loop(a, b)
        if in_a:
            return [m for part in a.iterations(index) for m in match(part, b)]
        return [m for part in b.iterations(index) for m in match(a, part)]
    matches = []
    pieces = cut(b, radix)
    for a_high, a_low in cut(a, radix):
        for b_high, b_low in pieces:
            highs = match(a_high, b_high)
            lows = match(a_low, b_low) if highs else []
            matches += [_joined(high, low) for high in highs for low in lows]
    return matches


def _joined(high: Match, low: Match) -> Match:
    return Match(high.key + low.key, high.left + low.left, high.right + low.right, high.loops + low.loops)


def _shortest_loop(a: Nest, b: Nest) -> tuple[bool, int]:
    candidates = [(n, 0, k) for k, (n, _, _) in enumerate(a.loops)]
    candidates += [(n, 1, k) for k, (n, _, _) in enumerate(b.loops)]
    _, which, index = min(candidates)
    return which == 0, index


class _Meeting(NamedTuple):
    """Where two progressions meet: from these indices, `times` times, this far apart."""

    a_index: int
    a_step: int
    b_index: int
    b_step: int
    times: int


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


def _match_progressions(a: Nest, b: Nest) -> list[Match]:
    found = _meet(a, b)
    if found is None:
        return []
    _, s, left = a.loops[0] if a.loops else (1, 0, 0)
    _, _, right = b.loops[0] if b.loops else (1, 0, 0)
    loops = ((found.times, s * found.a_step, left * found.a_step, right * found.b_step),)
    return [
        Match(
            a.key + found.a_index * s,
            a.carried + found.a_index * left,
            b.carried + found.b_index * right,
            loops if found.times > 1 else (),
        )
    ]


def minus(a: Nest, b: Nest) -> list[Nest]:
    """Return the indices of `a` whose keys are not in `b`; no key occurs twice in `b`."""
    if a.key > b.last or b.key > a.last:
        return [a]
    if len(a.loops) < 2 and len(b.loops) < 2:
        return _minus_progression(a, b)
    radix = choose_radix(a, b)
    if not radix:
        in_a, index = _shortest_loop(a, b)
        if in_a:
            return [remainder for part in a.iterations(index) for remainder in minus(part, b)]
        rest = [a]
        for part in b.iterations(index):
            rest = [remainder for piece in rest for remainder in minus(piece, part)]
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
    common = match(high, b[0])
    if not common or not match(low, b[1]):
        return [a]
    outside = [(piece, low) for piece in minus(high, b[0])]
    beside = minus(low, b[1])
    inside = [Nest(m.key, m.left, tuple((n, s, t) for n, s, t, _ in m.loops)) for m in common]
    return outside + [(piece, remainder) for piece in inside for remainder in beside]


def _minus_progression(a: Nest, b: Nest) -> list[Nest]:
    found = _meet(a, b)
    if found is None:
        return [a]
    if not a.loops:
        return []
    n, s, t = a.loops[0]
    first, step, gaps = found.a_index, found.a_step, found.times - 1
    end = first + gaps * step + 1
    if n - end >= step - 1:  # what follows the last common element begins with one more full gap
        end += step - 1
        gaps += 1
    rest: list[tuple[int, tuple[Loop, ...]]] = [
        (0, ((first, s, t),)),
        (first + 1, ((gaps, s * step, t * step), (step - 1, s, t))),
        (end, ((n - end, s, t),)),
    ]
    return [
        Nest(a.key + i * s, a.carried + i * t, tuple(loop for loop in loops if loop[0] > 1))
        for i, loops in rest
        if all(loop[0] for loop in loops)
    ]


def distinct(nest: Nest) -> list[Nest]:
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
        fresh = distinct(iteration)
        for part in parts:
            fresh = [remainder for piece in fresh for remainder in minus(piece, part)]
        parts += fresh
    return parts
