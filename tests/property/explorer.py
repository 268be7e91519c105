"""A small explicit-state explorer: runs real objects through every interleaving of a small job.

A world holds the product's own state machines and the channels between them. `steps()` lists what can
happen next as (label, method name, arguments); a label starting with "~" is an environment step, which
may never come (a poll that is not made, a crash). Reported is the shortest path to a bad state, or to a
state from which no path without environment steps leads to a good end: a deadlock or a trap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import msgspec
import pytest


class World(Protocol):
    def steps(self) -> Iterable[tuple[Any, ...]]: ...

    def bad(self) -> str: ...

    def good_end(self) -> bool: ...


class Found(NamedTuple):
    """What an exploration found: `verdict` is empty if nothing is wrong."""

    verdict: str
    trace: tuple[str, ...]
    num_states: int

    def __str__(self) -> str:
        listed = "".join(f"\n  {i:2} {label}" for i, label in enumerate(self.trace, 1))
        return f"{self.verdict or 'ok'} [{self.num_states} states]{listed}"


def explore(world: Any, *, limit: int = 400_000) -> Found:
    """Visit every reachable state, breadth first."""
    index = {digest(world): 0}
    parents: list[tuple[int, str]] = [(-1, "")]
    backward: list[list[int]] = [[]]
    good = [0] if world.good_end() else []
    frontier = deque([(0, world)])
    while frontier:
        here, state = frontier.popleft()
        for label, method, *arguments in state.steps():
            successor = clone(state)
            try:
                getattr(successor, method)(*arguments)
                why = successor.bad()
            except AssertionError as exc:
                why = f"assertion: {exc}"
            key = digest(successor)
            there = index.get(key)
            if there is None:
                there = index[key] = len(parents)
                parents.append((here, label))
                backward.append([])
                if why:
                    return Found(why, _path(parents, there), len(parents))
                assert there < limit, f"more than {limit} states: make the model smaller"
                frontier.append((there, successor))
                if successor.good_end():
                    good.append(there)
            if not label.startswith("~"):
                backward[there].append(here)
    stuck = _first_not_reaching(good, backward)
    if stuck is None:
        return Found("", (), len(parents))
    return Found("stuck: no good end can be reached", _path(parents, stuck), len(parents))


def _first_not_reaching(good: list[int], backward: list[list[int]]) -> int | None:
    fine = set(good)
    todo = list(good)
    while todo:
        for before in backward[todo.pop()]:
            if before not in fine:
                fine.add(before)
                todo.append(before)
    return next((i for i in range(len(backward)) if i not in fine), None)


def _path(parents: list[tuple[int, str]], state: int) -> tuple[str, ...]:
    labels = []
    while parents[state][0] >= 0:
        state, label = parents[state]
        labels.append(label)
    return tuple(reversed(labels))


_ATOMS = {int, str, bool, bytes, type(None), tuple, frozenset, range, float}


def clone(x: Any) -> Any:
    """Copy a tree of plain objects, dicts, lists and sets; tuples and frozen structs are shared."""
    kind = type(x)
    if kind in _ATOMS:
        return x
    if kind is dict:
        return {key: clone(value) for key, value in x.items()}
    if kind is list:
        return [clone(value) for value in x]
    if kind is set:
        return set(x)
    if isinstance(x, msgspec.Struct):
        return x
    copy = kind.__new__(kind)
    copy.__dict__.update({key: clone(value) for key, value in x.__dict__.items()})
    return copy


def digest(x: Any) -> int:
    """A hash of the whole tree; the order of dicts does not matter."""
    kind = type(x)
    if kind in _ATOMS:
        return hash((kind.__name__, x)) if kind is not int else hash(x + 3)
    if kind is dict:
        return hash(frozenset((key, digest(value)) for key, value in x.items()))
    if kind is list:
        return hash(("list", *[digest(value) for value in x]))
    if kind is set:
        return hash(frozenset(x))
    if isinstance(x, msgspec.Struct):
        return hash(x)
    return hash((kind.__name__, *[digest(value) for value in x.__dict__.values()]))


def walk(world: Any, choose: Callable[[int], int], *, num_steps: int, patience: int = 20_000) -> None:
    """Take random steps, then random ones without environment steps until a good end; for jobs too large
    to explore. `choose(n)` picks one of n."""
    for taken in range(num_steps + patience):
        if taken >= num_steps and world.good_end():
            return
        every = list(world.steps())
        own = [step for step in every if not step[0].startswith("~")]
        steps = every if taken < num_steps and (not own or not choose(30)) else own  # faults are rare
        if not steps:
            assert world.good_end(), "nothing can happen any more"
            return
        label, method, *arguments = steps[choose(len(steps))]
        getattr(world, method)(*arguments)
        why = world.bad()
        assert not why, f"{why}, after {label}"
    raise AssertionError(f"no good end in {patience} steps; what can happen: {[step[0] for step in steps]}")


def case(*parts: Any, slow: bool = False, **options: Any) -> Any:
    """A row of `parametrize`: `parts`, then the options of a world as a dict; its name says them all."""
    name = ", ".join([*map(str, parts), *(f"{key}={value}" for key, value in options.items())])
    marks = [pytest.mark.exhaustive, pytest.mark.timeout(600)] if slow else []
    return pytest.param(*parts, options, id=name, marks=marks)
