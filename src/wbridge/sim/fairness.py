"""fairness: how flows share links: no flow gets more at the cost of one that has less."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Hops = tuple[tuple[int, int], ...]
"""Of a flow: each link that it loads, and how many times: it may stand for several equal flows."""


def fair_rates(capacities: Sequence[float], paths: Sequence[Hops], counts: Sequence[int]) -> list[float]:
    """Return the max-min fair rate of one flow of each path; `counts` are flows of a path that are under way.

    Links are filled evenly. When one is full, what passes it has its rate, and the others share the rest.
    """
    free = {link: capacities[link] for hops in paths for link, _ in hops}
    weight = dict.fromkeys(free, 0)
    passing: dict[int, list[int]] = {link: [] for link in free}
    for number, (hops, count) in enumerate(zip(paths, counts, strict=True)):
        for link, times in hops:
            weight[link] += times * count
            passing[link].append(number)
    rates = [-1.0] * len(paths)
    shares = [(free[link] / weight[link], link) for link in free if weight[link]]
    heapq.heapify(shares)
    while shares:
        share, link = heapq.heappop(shares)
        if not weight[link]:
            continue
        now = free[link] / weight[link]
        if now > share * (1 + 1e-12):  # others on it have got their rates meanwhile: it has more for the rest
            heapq.heappush(shares, (now, link))
            continue
        for number in passing[link]:
            if rates[number] < 0 and counts[number]:
                rates[number] = now
                for other, times in paths[number]:
                    weight[other] -= times * counts[number]
                    free[other] = max(0.0, free[other] - now * times * counts[number])
    return [max(0.0, rate) for rate in rates]
