"""The commands of some how-tos run, and print what is shown below them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from wbridge.cli.main import main

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to"
BLOCK = re.compile(r"^```(console|toml)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CACHE = "/var/cache/wbridge"


@pytest.mark.parametrize("name", ["plan.md", "simulate.md"])
def test_commands_print_what_is_shown(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall((HOW_TO / name).read_text())
    for kind, text in blocks:
        if kind == "toml":
            (tmp_path / "job.toml").write_text(text)
    printed = ""
    for line in "".join(text for kind, text in blocks if kind == "console").splitlines():
        if line.startswith("$ wbridge "):
            arguments = [str(tmp_path) if word == CACHE else word for word in shlex.split(line)[2:]]
            assert main(arguments) == 0, capsys.readouterr().err
            printed = capsys.readouterr().out
        else:
            assert line in printed.splitlines() or not line
