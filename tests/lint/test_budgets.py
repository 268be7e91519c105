"""Limits that no off-the-shelf linter checks: sizes, where torch may appear, where the mode may be read."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "wbridge"
MODULES = sorted(SOURCE.rglob("*.py"))
MODULE_LINES = 400
FUNCTION_LINES = 50

TORCH_MAY_APPEAR_IN = ("device/", "discovery/", "engine/apply.py", "integrations/")
FRAMEWORKS = ("transformers", "vllm", "megatron", "sglang", "ray", "trl", "deepspeed", "accelerate")
UNPICKLERS = ("pickle", "cloudpickle", "dill", "marshal", "shelve")
DEPENDS_ON_THE_MODE = (
    "mode",
    "sender_staging",
    "receiver_staging",
    "source_held",
    "lands_when_parked",
    "effective_delivery",
)
MODE_MAY_BE_READ_IN = (
    "config.py",  # says what a mode means
    "control/planning.py",  # checks that rings are large enough
    "control/publishing.py",  # builds the tickets of an epoch
    "engine/lockstep.py",  # builds the leader of an engine
    "sim/",  # builds the machines of a simulated job
    "session/contexts.py",  # builds the staging of an epoch
)


def name(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(), str(path)) for path in MODULES}


def found(trees: dict[Path, ast.Module], check: Callable[[Path, ast.Module], Iterator[str]]) -> list[str]:
    return [f"{name(path)}:{problem}" for path, tree in trees.items() for problem in check(path, tree)]


def imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, (node.module or "").partition(".")[0]


def test_modules_are_short() -> None:
    sizes = {name(path): len(path.read_text().splitlines()) for path in MODULES}
    assert {path: size for path, size in sizes.items() if size > MODULE_LINES} == {}


def test_functions_are_short(trees: dict[Path, ast.Module]) -> None:
    def long_ones(_: Path, tree: ast.Module) -> Iterator[str]:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                size = node.end_lineno - node.lineno + 1
                if size > FUNCTION_LINES:
                    yield f"{node.lineno} {node.name} has {size} lines"

    assert found(trees, long_ones) == []


def test_torch_and_frameworks_stay_in_their_layers(trees: dict[Path, ast.Module]) -> None:
    def strays(path: Path, tree: ast.Module) -> Iterator[str]:
        for line, module in imported(tree):
            if module == "torch" and not name(path).startswith(TORCH_MAY_APPEAR_IN):
                yield f"{line} imports torch"
            if module in FRAMEWORKS and not name(path).startswith("integrations/"):
                yield f"{line} imports {module}"

    assert found(trees, strays) == []


def test_nothing_is_unpickled(trees: dict[Path, ast.Module]) -> None:
    def unpicklers(_: Path, tree: ast.Module) -> Iterator[str]:
        yield from (f"{line} imports {module}" for line, module in imported(tree) if module in UNPICKLERS)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load":
                yield f"{node.lineno} calls torch.load"

    assert found(trees, unpicklers) == []


def test_the_mode_is_read_only_where_the_staging_is_chosen(trees: dict[Path, ast.Module]) -> None:
    """The four modes differ in what is built when an epoch starts; nothing later asks which mode it is."""

    def readers(path: Path, tree: ast.Module) -> Iterator[str]:
        if name(path).startswith(MODE_MAY_BE_READ_IN):
            return
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute):
                continue
            if node.attr in DEPENDS_ON_THE_MODE:
                yield f"{node.lineno} reads .{node.attr}"
            elif ast.unparse(node.value) == "Mode":
                yield f"{node.lineno} names {ast.unparse(node)}"

    assert found(trees, readers) == []


def test_broad_excepts_re_raise_or_give_a_reason(trees: dict[Path, ast.Module]) -> None:
    def silent_ones(path: Path, tree: ast.Module) -> Iterator[str]:
        lines = path.read_text().splitlines()
        for node in ast.walk(tree):
            if not isinstance(node, ast.ExceptHandler):
                continue
            is_broad = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
            re_raises = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
            if is_broad and not re_raises and "#" not in lines[node.lineno - 1]:
                yield f"{node.lineno} {lines[node.lineno - 1].strip()}"

    assert found(trees, silent_ones) == []


def test_ignores_name_their_code_and_reason() -> None:
    assert lines_with(r"# type: ignore(?!\[[\w, -]+\]  # \S)") == []


def test_nothing_is_left_for_later() -> None:
    assert lines_with(r"\b(TODO|FIXME|XXX|HACK|NotImplementedError)\b") == []


def test_sleeps_are_a_capped_back_off_or_give_a_reason(trees: dict[Path, ast.Module]) -> None:
    def others(path: Path, tree: ast.Module) -> Iterator[str]:
        lines = path.read_text().splitlines()
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            text = "\n".join(lines[function.lineno - 1 : function.end_lineno])
            if re.search(r"\.sleep\((?!.*#)", text) and "back-off" not in text:
                yield f"{function.lineno} {function.name} sleeps"

    assert found(trees, others) == []


def lines_with(pattern: str) -> list[str]:
    matches = re.compile(pattern).search
    return [
        f"{name(path)}:{number} {line.strip()}"
        for path in MODULES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if matches(line)
    ]
