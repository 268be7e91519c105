"""Every await of a package as a point: listed from its code, seen in a run, and cut there."""

from __future__ import annotations

import asyncio
import dis
import gc
import importlib.util
import inspect
import sys
from bisect import bisect_right
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator
from contextlib import contextmanager
from contextvars import Context
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, Final, Literal, TypeAlias

import msgspec

Kind: TypeAlias = Literal["await", "enter", "leave", "next"]
"""`await`; the two ends of `async with`; one round of `async for`."""

Chain: TypeAlias = "tuple[Point, ...]"
"""The points at which a suspended task stands, from its outermost frame to the innermost."""

Inject: TypeAlias = "Callable[[Chain], BaseException | None]"
"""Called in the task, at the chosen suspension. What it returns is raised there."""

_ENDS: Final[dict[int, Kind]] = {1: "enter", 2: "leave"}
"""Arguments of the instruction GET_AWAITABLE."""


class Point(msgspec.Struct, frozen=True, order=True):
    """One place in the code where a coroutine may be suspended. `file` is relative to the package."""

    file: str
    line: int
    column: int
    kind: Kind

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.kind}"


class Code:
    """The files whose awaits count, as `package/module.py` relative to the directory of `package`."""

    def __init__(self, package: str, files: Iterable[str]) -> None:
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.origin is not None
        self._root = Path(spec.origin).parent
        self._names = {str(self._root / file): file for file in files}
        self._tables: dict[CodeType, tuple[list[int], list[Point]]] = {}

    def points(self) -> list[Point]:
        """Every point in the source, in order."""
        found: set[Point] = set()
        for path in self._names:
            pending = [compile(Path(path).read_text(), path, "exec")]
            while pending:
                code = pending.pop()
                found.update(self._table(code)[1])
                pending += [const for const in code.co_consts if isinstance(const, CodeType)]
        return sorted(found)

    def has(self, frame: FrameType) -> bool:
        return frame.f_code.co_filename in self._names

    def at(self, frame: FrameType) -> Point | None:
        """Return the point at which a frame is suspended, or about to be."""
        if not self.has(frame):
            return None
        offsets, points = self._table(frame.f_code)
        index = bisect_right(offsets, frame.f_lasti) - 1
        return points[index] if index >= 0 else None

    def of(self, frame: FrameType) -> list[Point]:
        """All points of a frame's function."""
        return self._table(frame.f_code)[1]

    def starts_at(self, frame: FrameType) -> Point | None:
        """Return the point whose first instruction the frame is about to execute."""
        offsets, points = self._table(frame.f_code)
        index = bisect_right(offsets, frame.f_lasti) - 1
        return points[index] if index >= 0 and offsets[index] == frame.f_lasti else None

    def _table(self, code: CodeType) -> tuple[list[int], list[Point]]:
        if code not in self._tables:
            self._tables[code] = [], []
            offsets, points = self._tables[code]
            for instruction in dis.get_instructions(code):
                if instruction.opname not in ("GET_AWAITABLE", "GET_ANEXT"):
                    continue
                place = instruction.positions
                assert place is not None and place.lineno is not None and place.col_offset is not None
                is_next = instruction.opname == "GET_ANEXT"
                kind: Kind = "next" if is_next else _ENDS.get(instruction.arg or 0, "await")
                offsets.append(instruction.offset)
                points.append(Point(self._names[code.co_filename], place.lineno, place.col_offset, kind))
        return self._tables[code]


class Cut(msgspec.Struct, frozen=True):
    """Where a run is cut: at the `nth` (from 1) suspension of any task that stands at `point`."""

    point: Point
    nth: int = 1


class Watch:
    """Sees every suspension of every task of the running loop; at `cut` it calls `inject`."""

    def __init__(self, code: Code, cut: Cut | None = None, inject: Inject | None = None) -> None:
        self._code = code
        self._cut = cut
        self._inject = inject
        self._num_at_cut = 0
        self.chains: list[Chain] = []
        """One for each suspension within the code, if there is no cut."""
        self.executed: set[Point] = set()
        """Points that were executed, suspended or not, while `trace` was on."""
        self.is_cut = False
        self._is_stopped = False

    @contextmanager
    def tasks(self) -> Iterator[None]:
        """Watch the tasks that are made inside this context, on the running loop."""
        loop = asyncio.get_running_loop()
        before = loop.get_task_factory()
        loop.set_task_factory(self._make_task)
        try:
            yield
        finally:
            loop.set_task_factory(before)

    def cuts_in(self, files: tuple[str, ...]) -> bool:
        return self._cut is not None and self._cut.point.file in files

    def stop(self) -> None:
        """See no more."""
        self._is_stopped = True

    def _make_task(
        self,
        loop: asyncio.AbstractEventLoop,
        coro: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
        *,
        context: Context | None = None,
        name: str | None = None,
    ) -> asyncio.Task[Any]:
        assert isinstance(coro, Coroutine)
        return asyncio.Task(Watched(coro, self), loop=loop, context=context, name=name)

    def suspended(self, coro: Coroutine[Any, Any, Any]) -> BaseException | None:
        """A task has stopped to wait. Return what is to be raised where it stands."""
        if self.is_cut or self._is_stopped:
            return None
        chain = tuple(point for frame in _frames(coro) if (point := self._code.at(frame)) is not None)
        if not chain:
            return None
        if self._cut is None:
            self.chains.append(chain)
            return None
        if self._cut.point not in chain:
            return None
        self._num_at_cut += 1
        if self._num_at_cut != self._cut.nth:
            return None
        self.is_cut = True
        return self._inject(chain) if self._inject is not None else None

    @contextmanager
    def trace(self, *, raising: BaseException | None = None) -> Iterator[None]:
        """Note what is executed without being suspended; or raise `raising` there, at the cut's line."""

        def enter(frame: FrameType, event: str, arg: object) -> Any:  # Any: as `settrace` has it
            if not self._code.has(frame):
                return None
            frame.f_trace_opcodes = raising is None
            return step

        def step(frame: FrameType, event: str, arg: object) -> Any:  # Any: likewise
            if raising is None:
                if event == "opcode" and (point := self._code.starts_at(frame)) is not None:
                    self.executed.add(point)
            elif event == "line" and not self.is_cut and self._stands_before_cut(frame):
                self.is_cut = True
                sys.settrace(None)
                raise raising
            return step

        before = sys.gettrace()
        sys.settrace(enter)  # what is raised in it ends it
        try:
            yield
        finally:
            sys.settrace(before)

    def _stands_before_cut(self, frame: FrameType) -> bool:
        cut = self._cut
        return cut is not None and frame.f_lineno == cut.point.line and cut.point in self._code.of(frame)


class Watched(Coroutine[Any, Any, Any]):
    """A task's coroutine that reports where it is suspended."""

    def __init__(self, coro: Coroutine[Any, Any, Any], watch: Watch) -> None:
        self._coro = coro
        self._watch = watch

    def __getattr__(self, name: str) -> Any:  # Any: `cr_frame` and the like, for whoever looks inside
        return getattr(self._coro, name)

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coro.__await__()

    def send(self, value: object) -> object:
        return self._stopped(self._coro.send(value))

    def throw(  # type: ignore[override]  # one of the three forms, the only one that tasks use
        self, kind: BaseException, value: None = None, trace: TracebackType | None = None
    ) -> object:
        return self._stopped(self._coro.throw(kind))

    def close(self) -> None:
        self._coro.close()

    def _stopped(self, waits_for: object) -> object:
        error = self._watch.suspended(self._coro)
        return waits_for if error is None else self.throw(error)


def _frames(awaited: object) -> Iterator[FrameType]:
    """The frames of a suspended coroutine, from the outside in."""
    while awaited is not None:
        if inspect.iscoroutine(awaited):
            frame, awaited = awaited.cr_frame, awaited.cr_await
        elif inspect.isgenerator(awaited):
            frame, awaited = awaited.gi_frame, awaited.gi_yieldfrom
        else:
            generator = _generator_behind(awaited)
            if generator is None:
                return
            frame, awaited = generator.ag_frame, generator.ag_await
        if frame is not None:
            yield frame


def _generator_behind(awaited: object) -> Any | None:  # Any: an async generator of whatever
    """An `async for` awaits an object that does not name its generator."""
    if type(awaited).__name__ not in ("async_generator_asend", "async_generator_athrow"):
        return None
    return next((found for found in gc.get_referents(awaited) if inspect.isasyncgen(found)), None)
