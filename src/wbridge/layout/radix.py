"""Where to cut nests into high and low digits, and the cut itself."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from typing import NamedTuple

from wbridge.layout.nest import Nest, descending


class _Run(NamedTuple):
    """Iterations of the largest low loop, from `first`, that start in one block of `radix` keys."""

    first: int
    length: int
    block: int
    crosses: bool


def cut(nest: Nest, radix: int) -> list[tuple[Nest, Nest]]:
    """Partition a nest into products (high, low): keys of `high` are multiples of `radix`, of `low` below it.

    A range over finer strides gives a head, a middle and a tail; the carried offset stays in `high`.
    """
    parts = [nest]
    for loop_index in range(len(nest.loops) - 1, -1, -1):
        s = nest.loops[loop_index][1]
        if s > radix and s % radix:
            parts = [phase for part in parts for phase in _phases(part, loop_index, radix)]
    products = []
    for part in parts:
        low_key = part.key % radix
        at = next((k for k, (_, s, _) in enumerate(part.loops) if s < radix), len(part.loops))
        high, low = part.loops[:at], part.loops[at:]
        for more, inner in _carry(Nest(low_key, 0, low), radix):
            key, carried = part.key - low_key + more.key, part.carried + more.carried
            loops = tuple(sorted(high + more.loops, key=descending))
            products.append((Nest(key, carried, loops), inner))
    return products


def _phases(nest: Nest, loop_index: int, radix: int) -> list[Nest]:
    """Split a loop whose stride is no multiple of `radix` into loops whose stride is one."""
    n, s, t = nest.loops[loop_index]
    step = radix // gcd(s, radix)
    before, after = nest.loops[:loop_index], nest.loops[loop_index + 1 :]
    parts = []
    for phase in range(min(step, n)):
        count = (n - phase + step - 1) // step
        loop = ((count, s * step, t * step),) if count > 1 else ()
        parts.append(Nest(nest.key + phase * s, nest.carried + phase * t, before + loop + after))
    return parts


def _carry(nest: Nest, radix: int) -> list[tuple[Nest, Nest]]:
    """Cut a nest whose strides are all below `radix` and whose key is in [0, radix)."""
    if nest.last < radix:
        return [(Nest(0, nest.carried), Nest(nest.key, 0, nest.loops))]
    n, s, t = nest.loops[0]
    rest = nest.loops[1:]
    key, carried = nest.key, nest.carried
    products: list[tuple[Nest, Nest]] = []
    head = -((key - radix) // s)  # iterations that start in the first block
    if key >= s and head < n:
        products += _cut_runs(Nest(key, carried, ((head, s, t), *rest)), radix)
        n, key, carried = n - head, key + head * s, carried + head * t
    period, blocks = radix // gcd(s, radix), s // gcd(s, radix)
    repeats, tail = divmod(n, period)
    if repeats:
        for high, low in _cut_runs(Nest(key, carried, ((period, s, t), *rest)), radix):
            if repeats > 1:
                high = high._replace(loops=((repeats, blocks * radix, period * t), *high.loops))
            products.append((high, low))
    if tail:
        done = repeats * period
        products += _cut_runs(Nest(key + done * s, carried + done * t, ((tail, s, t), *rest)), radix)
    return products


def _cut_runs(nest: Nest, radix: int) -> list[tuple[Nest, Nest]]:
    (n, s, t), rest = nest.loops[0], nest.loops[1:]
    products = []
    for run in _runs(nest.key, n, s, Nest(0, 0, rest).last, radix):
        low_key = nest.key + run.first * s - run.block * radix
        carried = nest.carried + run.first * t
        base = run.block * radix
        if run.crosses:
            for more, low in _carry(Nest(low_key, carried, rest), radix):
                products.append((more._replace(key=base + more.key), low))
        else:
            loops = ((run.length, s, t), *rest) if run.length > 1 else rest
            products.append((Nest(base, carried), Nest(low_key, 0, loops)))
    return products


def _runs(key: int, n: int, stride: int, inner_span: int, radix: int) -> Iterator[_Run]:
    i = 0
    while i < n:
        block, low = divmod(key + i * stride, radix)
        room = radix - 1 - inner_span - low
        count = min(room // stride + 1, n - i) if room >= 0 else 0
        yield _Run(i, max(count, 1), block, crosses=not count)
        i += max(count, 1)


def choose_radix(a: Nest, b: Nest) -> int:
    """Return where to cut both nests so that fewer loops remain on each side; 0: unroll a loop instead."""
    strides = {s for _, s, _ in a.loops} | {s for _, s, _ in b.loops}
    cheapest = min(n for n, _, _ in a.loops + b.loops) + 1
    best = 0
    for radix in sorted(strides, reverse=True):
        cost = _cut_cost(a, b, radix)
        if cost == 1:
            return radix
        if cost and cost < cheapest:
            best, cheapest = radix, cost
    common = {gcd(s, t) for s in strides for t in strides} - strides
    for radix in sorted(common, reverse=True):
        cost = _cut_cost(a, b, radix)
        if cost and cost < cheapest:
            best, cheapest = radix, cost
    return best


def _cut_cost(a: Nest, b: Nest, radix: int) -> int:
    """Return how many products a cut gives (1: only heads and tails), 0 when it makes no progress."""
    num_high = num_low = 0
    cost = 1
    for nest in (a, b):
        span = largest = 0
        phased, nested = False, True
        for n, s, _ in reversed(nest.loops):
            if s < radix:
                num_low += 1
                nested = nested and s > span
                span += (n - 1) * s
                largest = s
                continue
            num_high += 1
            if s % radix:
                phased = True
                cost *= min(n, radix // gcd(s, radix))
        if largest and (phased or nest.key % radix + span >= radix):
            if not nested:
                return 0
            num_high += 1
            cost *= min(largest // gcd(largest, radix), span // radix + 2)
    total = len(a.loops) + len(b.loops)
    return cost if num_high < total and num_low < total else 0
