"""Levelling: divide amounts among links that may carry them so that the fullest link takes the least time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Set = tuple[int, ...]
"""Links, by index, in ascending order."""

TOLERANCE = 1e-6
"""Rounds end when no link's time changes by more than this part of the largest."""


def level(
    amounts: Mapping[Set, float], widths: Sequence[float], *, num_rounds: int = 200
) -> dict[Set, list[float]]:
    """Divide the amount of each set of links among its members; return their parts in the set's order.

    Filling one set at a time up to a common level, in turn, lowers the sum of squared times and reaches
    its minimum, which has the least possible maximum. Links that occur in the same sets are one column.
    """
    sets_of: dict[int, list[int]] = {}
    ordered = sorted(amounts)
    for number, links in enumerate(ordered):
        for link in links:
            sets_of.setdefault(link, []).append(number)
    columns: dict[tuple[object, ...], list[int]] = {}
    for link in sorted(sets_of):
        columns.setdefault((tuple(sets_of[link]), widths[link]), []).append(link)
    column_of = {link: k for k, members in enumerate(columns.values()) for link in members}
    sizes = [len(members) for members in columns.values()]
    column_widths = [widths[members[0]] * len(members) for members in columns.values()]
    keys = {links: tuple(sorted({column_of[link] for link in links})) for links in ordered}
    flows = _settle({keys[links]: amounts[links] for links in ordered}, column_widths, num_rounds)
    parts: dict[Set, list[float]] = {}
    for links in ordered:
        of_column = dict(zip(keys[links], flows[keys[links]], strict=True))
        parts[links] = [of_column[column_of[link]] / sizes[column_of[link]] for link in links]
    return parts


def _settle(amounts: Mapping[Set, float], widths: Sequence[float], num_rounds: int) -> dict[Set, list[float]]:
    flows = {key: [0.0] * len(key) for key in amounts}
    loads = [0.0] * len(widths)
    order = sorted(amounts, key=lambda key: (len(key), key))
    for _ in range(num_rounds):
        moved = 0.0
        for key in order:
            before = flows[key]
            base = [loads[k] - flow for k, flow in zip(key, before, strict=True)]
            after = _fill(base, [widths[k] for k in key], amounts[key])
            for k, low, flow, old in zip(key, base, after, before, strict=True):
                loads[k] = low + flow
                moved = max(moved, abs(flow - old) / widths[k])
            flows[key] = after
        if moved <= TOLERANCE * max((load / w for load, w in zip(loads, widths, strict=True)), default=0.0):
            break
    return flows


def _fill(base: Sequence[float], widths: Sequence[float], amount: float) -> list[float]:
    """Pour `amount` over columns that hold `base`; return what each takes until all stand equally high."""
    if len(base) == 1:
        return [amount]
    order = sorted(range(len(base)), key=lambda k: base[k] / widths[k])
    width, held = 0.0, 0.0
    surface = 0.0
    for turn, k in enumerate(order):
        width, held = width + widths[k], held + base[k]
        surface = (held + amount) / width
        if turn + 1 == len(order):
            break
        following = order[turn + 1]
        if surface <= base[following] / widths[following]:
            break
    return [max(0.0, surface * w - low) for low, w in zip(base, widths, strict=True)]
