"""Every kind of await is listed from the code, seen when a task is suspended there, and can be cut."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path
from types import ModuleType

import pytest

from wbridge.testing.awaits import Chain, Code, Cut, Point, Watch
from wbridge.testing.clock import run_virtual

SOURCE = """
import asyncio

async def outer(event):
    async with asyncio.timeout(9.0), Block():
        async for _ in numbers():
            await inner(event)
    return "done"

async def inner(event):
    if event.is_set():
        await never()
    await event.wait()

async def never():
    await asyncio.sleep(1.0)

async def numbers():
    await asyncio.sleep(1.0)
    yield 1

class Block:
    async def __aenter__(self):
        pass

    async def __aexit__(self, *error):
        try:
            await asyncio.sleep(1.0)
        finally:
            pass
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    package = tmp_path / "waiting_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "waits.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    return importlib.import_module("waiting_package.waits")


@pytest.fixture
def code(module: ModuleType) -> Code:
    return Code("waiting_package", ["waits.py"])


def line(text: str) -> int:
    return next(i for i, found in enumerate(SOURCE.splitlines(), 1) if text in found)


def run(module: ModuleType, watch: Watch) -> object:
    async def main() -> object:
        event = asyncio.Event()
        with watch.tasks():
            task = asyncio.create_task(module.outer(event))
            asyncio.get_running_loop().call_later(3.0, event.set)
            return (await asyncio.gather(task, return_exceptions=True))[0]

    return run_virtual(main)


def test_every_kind_is_listed_once(code: Code) -> None:
    listed = [(p.line, p.kind) for p in code.points()]
    assert listed == [
        (line("async with"), "enter"),
        (line("async with"), "leave"),
        (line("async for"), "next"),
        (line("await inner"), "await"),
        (line("await never"), "await"),
        (line("await event"), "await"),
        (line("def never") + 1, "await"),
        (line("def numbers") + 1, "await"),
        (line("try:") + 1, "await"),
    ]


def test_suspensions_are_seen_from_the_outside_in_and_executed_points_too(
    module: ModuleType, code: Code
) -> None:
    watch = Watch(code)
    with watch.trace():
        assert run(module, watch) == "done"
    assert [[(p.line, p.kind) for p in chain] for chain in watch.chains] == [
        [(line("async for"), "next"), (line("def numbers") + 1, "await")],
        [(line("await inner"), "await"), (line("await event"), "await")],
        [(line("async with"), "leave"), (line("try:") + 1, "await")],
    ]
    unreached = {point.line for point in code.points()} - {point.line for point in watch.executed}
    assert unreached == {line("await never"), line("def never") + 1}


def test_a_cut_raises_where_the_task_stands(module: ModuleType, code: Code) -> None:
    seen: list[Chain] = []

    def inject(chain: Chain) -> BaseException:
        seen.append(chain)
        return OSError("cut")

    (point,) = [p for p in code.points() if p.line == line("await event")]
    watch = Watch(code, Cut(point), inject)
    assert isinstance(run(module, watch), OSError)
    assert watch.is_cut and [chain[-1] for chain in seen] == [point]


def test_a_statement_fails_before_it_waits(module: ModuleType, code: Code) -> None:
    (point,) = [p for p in code.points() if p.line == line("await event")]
    watch = Watch(code, Cut(point))
    with watch.trace(raising=OSError("cut")):
        assert isinstance(run(module, watch), OSError)
    assert watch.is_cut


def test_points_name_their_place() -> None:
    assert str(Point("control/lease.py", 7, 4, "await")) == "control/lease.py:7 await"
