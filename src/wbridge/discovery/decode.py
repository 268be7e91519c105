"""Find the loops in a list of index pairs: the inverse of walking a strided region."""

from __future__ import annotations

from typing import NamedTuple

import torch

from wbridge.layout.region import Region, Strided


class _Nest(NamedTuple):
    extents: tuple[int, ...]
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]
    source: int
    target: int


def decode(source: torch.Tensor, target: torch.Tensor) -> list[Region]:
    """Return regions that visit exactly the pairs `(source[i], target[i])`; no stride is negative.

    Both are 1-d int64 tensors of the same length. Regular orders give few regions.
    """
    inner: list[_Nest] = []
    while (loop := _innermost_loop(source, target)) is not None:
        inner.insert(0, loop)
        source, target = source[:: loop.extents[0]], target[:: loop.extents[0]]
    nests = _runs(source, target)
    while len(merged := _merge(nests)) < len(nests):
        nests = merged
    return [_region((nest, *inner)) for nest in nests]


def _innermost_loop(source: torch.Tensor, target: torch.Tensor) -> _Nest | None:
    """Return the loop that the first run begins, if all pairs come in runs like it."""
    if source.numel() < 2:
        return None
    steps = torch.stack((source.diff(), target.diff()))
    breaks = (steps != steps[:, :1]).any(0).nonzero()
    count = int(breaks[0]) + 1 if breaks.numel() else source.numel()
    if source.numel() % count or bool((steps[:, 0] < 0).any()):
        return None
    for values, step in ((source, steps[0, 0]), (target, steps[1, 0])):
        rows = values.view(-1, count)
        if not torch.equal(rows - rows[:, :1], (torch.arange(count) * step).expand_as(rows)):
            return None
    return _Nest((count,), (int(steps[0, 0]),), (int(steps[1, 0]),), 0, 0)


def _region(nests: tuple[_Nest, ...]) -> Region:
    """Nest these one inside the other."""
    return Region(
        tuple(n for nest in nests for n in nest.extents),
        Strided(sum(nest.source for nest in nests), tuple(s for nest in nests for s in nest.source_strides)),
        Strided(sum(nest.target for nest in nests), tuple(s for nest in nests for s in nest.target_strides)),
    )


def _runs(source: torch.Tensor, target: torch.Tensor) -> list[_Nest]:
    """Cut into runs of constant steps; a run keeps its first break for the step to the next run."""
    n = source.numel()
    if n < 2:
        return [_single(int(source[i]), int(target[i])) for i in range(n)]
    steps = torch.stack((source.diff(), target.diff()))
    changes = ((steps[:, 1:] != steps[:, :-1]).any(0)).nonzero().flatten() + 1
    cuts = [0, *changes.tolist(), n - 1]  # steps[cuts[k] : cuts[k + 1]] are equal
    first = source[cuts[:-1]].tolist(), target[cuts[:-1]].tolist()
    step = steps[:, cuts[:-1]].tolist()
    nests: list[_Nest] = []
    taken = 0  # elements before this index are in a run
    for k in range(len(cuts) - 1):
        begin, end = cuts[k], cuts[k + 1]  # elements begin..end inclusive lie on one line
        s, t, ds, dt = first[0][k], first[1][k], step[0][k], step[1][k]
        if begin < taken:
            begin, s, t = begin + 1, s + ds, t + dt
        count = end - begin + 1
        if count > 1 and ds >= 0 and dt >= 0 and (count > 2 or k == len(cuts) - 2 or not _is_longer(cuts, k)):
            nests.append(_Nest((count,), (ds,), (dt,), s, t))
            taken = end + 1
        else:
            nests += [_single(s + i * ds, t + i * dt) for i in range(count - 1)]
            taken = end
    if taken < n:
        nests.append(_single(int(source[-1]), int(target[-1])))
    return nests


def _is_longer(cuts: list[int], k: int) -> bool:
    """Whether the line after segment `k` is long: then the element between belongs to it."""
    return k + 2 < len(cuts) and cuts[k + 2] - cuts[k + 1] > 1


def _single(source: int, target: int) -> _Nest:
    return _Nest((), (), (), source, target)


def _merge(nests: list[_Nest]) -> list[_Nest]:
    """Join neighbours of equal shape at constant distance into one more loop."""
    merged: list[_Nest] = []
    i = 0
    while i < len(nests):
        a = nests[i]
        j = i + 1
        if j < len(nests) and nests[j][:3] == a[:3]:
            ds, dt = nests[j].source - a.source, nests[j].target - a.target
            while (
                j < len(nests)
                and nests[j][:3] == a[:3]
                and nests[j].source - nests[j - 1].source == ds
                and nests[j].target - nests[j - 1].target == dt
            ):
                j += 1
            if ds >= 0 and dt >= 0:
                a = _Nest(
                    (j - i, *a.extents), (ds, *a.source_strides), (dt, *a.target_strides), a.source, a.target
                )
            else:
                j = i + 1
        merged.append(a)
        i = j
    return merged
