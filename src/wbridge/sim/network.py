"""Network: bytes on their way over links that all flows share fairly."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

from wbridge.sim.fairness import Hops, fair_rates
from wbridge.sim.timeline import Timeline


class _Path:
    """All flows over the same links. They have equal rates, so one number tells what each has moved."""

    def __init__(self, hops: Hops) -> None:
        self.hops = hops
        self.moved = 0.0  # bytes of each flow since the path was first used, until `at_s`
        self.at_s = 0.0
        self.rate = 0.0
        self.flows: list[tuple[float, int, Callable[[], None]]] = []  # by where `moved` is when they end


class Network:
    """Moves bytes at max-min fair rates; rates change when a flow begins or ends.

    Changes within `resolution_s` are made together, so that many flows cost less; a flow then ends at most
    half of it too early, or all of it too late. 0: each at its own time.
    """

    def __init__(self, timeline: Timeline, capacities: Sequence[float], *, resolution_s: float = 0.0) -> None:
        self._timeline, self._capacities, self._resolution_s = timeline, tuple(capacities), resolution_s
        self._paths: dict[Hops, _Path] = {}
        self._active: dict[Hops, _Path] = {}
        self._turn = 0  # of the newest change; what was planned for an older one is void
        self._is_due = False
        self._num_flows = 0
        self.carried: list[float] = [0.0] * len(self._capacities)
        """Bytes by link, of flows that have begun."""

    def send(self, hops: Hops, nbytes: int, done: Callable[[], None]) -> None:
        """Move bytes over these links; `done` is called when the last one is through."""
        if not nbytes or not hops:
            self._timeline.after(0.0, done)
            return
        for link, times in hops:
            self.carried[link] += nbytes * times
        path = self._paths.get(hops)
        if path is None:
            path = self._paths[hops] = _Path(hops)
        self._advance(path)
        self._active[hops] = path
        self._num_flows += 1
        heapq.heappush(path.flows, (path.moved + nbytes, self._num_flows, done))
        self._change_soon()

    def _change_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._timeline.after(self._resolution_s, self._change)

    def _advance(self, path: _Path) -> None:
        now_s = self._timeline.now
        path.moved += path.rate * (now_s - path.at_s)
        path.at_s = now_s

    def _change(self) -> None:
        """End what is over, let others begin in its place, then share the links anew."""
        self._is_due = True
        for done in self._ended():
            done()
        self._is_due = False
        paths = list(self._active.values())
        rates = fair_rates(self._capacities, [p.hops for p in paths], [len(p.flows) for p in paths])
        for path, rate in zip(paths, rates, strict=True):
            path.rate = rate
        self._turn += 1
        if paths:
            next_s = min((path.flows[0][0] - path.moved) / path.rate for path in paths)
            self._timeline.after(max(next_s, self._resolution_s), self._planned(self._turn))

    def _ended(self) -> list[Callable[[], None]]:
        """Take out the flows that are over; return whom to tell, in the order in which they began."""
        ended: list[tuple[int, Callable[[], None]]] = []
        least_s = max(self._resolution_s / 2, math.ulp(self._timeline.now))  # no less can be waited for
        for hops, path in list(self._active.items()):
            self._advance(path)
            limit = path.moved + max(path.rate * least_s, 1e-9 * path.moved + 1e-6)
            while path.flows and path.flows[0][0] <= limit:
                _, number, done = heapq.heappop(path.flows)
                ended.append((number, done))
            if not path.flows:
                path.rate = 0.0
                del self._active[hops]
        return [done for _, done in sorted(ended, key=lambda end: end[0])]

    def _planned(self, turn: int) -> Callable[[], None]:
        def change() -> None:
            if turn == self._turn and not self._is_due:
                self._change()

        return change
