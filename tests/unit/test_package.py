"""The package itself: cheap to import, complete in its names, clear about what is missing."""

from __future__ import annotations

import runpy
import subprocess
import sys

import pytest

import wbridge
from wbridge import native

IMPORT_AND_LIST = "import sys; before = set(sys.modules); import wbridge; print(*set(sys.modules) - before)"


def test_import_is_cheap() -> None:
    run = subprocess.run([sys.executable, "-c", IMPORT_AND_LIST], capture_output=True, text=True, check=True)
    loaded = run.stdout.split()
    assert [name for name in loaded if name.startswith("wbridge")] == ["wbridge"]
    assert not {"torch", "ucxx", "cuda", "anyio", "asyncio", "msgspec"} & set(loaded)
    assert len(loaded) < 40


@pytest.mark.parametrize("name", wbridge.__all__)
def test_every_public_name_loads(name: str) -> None:
    assert getattr(wbridge, name) is getattr(wbridge, name)


def test_names_are_listed_once() -> None:
    assert sorted(wbridge._HOMES.keys() | set(wbridge._MODULES) | {"__version__"}) == sorted(wbridge.__all__)
    assert dir(wbridge) == sorted(wbridge.__all__)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'sender'"):
        wbridge.sender  # noqa: B018


def test_missing_part_names_the_extra() -> None:
    with pytest.raises(wbridge.NativeUnavailable, match=r"\.\[cu12\]") as raised:
        native.require("wbridge_absent_part")
    assert isinstance(raised.value, ImportError)


def test_broken_part_says_so(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]  # pytest's own
    (tmp_path / "wbridge_broken_part.py").write_text("raise ImportError('libgone.so: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(wbridge.NativeUnavailable, match="does not load: libgone"):
        native.require("wbridge_broken_part")


def test_the_command_runs_as_a_module_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["anything", "--version"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("wbridge", run_name="__main__")
    assert end.value.code == 0
    assert capsys.readouterr().out == f"wbridge {wbridge.__version__}\n"
