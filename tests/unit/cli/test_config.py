from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from wbridge.cli.config import parse
from wbridge.cli.main import main
from wbridge.config import Config
from wbridge.errors import ConfigError


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Config.__struct_fields__:
        monkeypatch.delenv(f"WBRIDGE_{name.upper()}", raising=False)


def test_every_setting_has_a_line_with_its_origin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    toml = tmp_path / "job.toml"
    toml.write_text("num_slots = 7\n")
    monkeypatch.setenv("WBRIDGE_HEARTBEAT_S", "2")

    assert main(["config", "--set", "mode=async", "--toml", str(toml)]) == 0

    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert lines.keys() == {"setting", *Config.__struct_fields__}
    assert lines["mode"] == ["mode", "async", "argument"]
    assert lines["heartbeat_s"] == ["heartbeat_s", "2.0", "seconds", "WBRIDGE_HEARTBEAT_S"]
    assert lines["num_slots"] == ["num_slots", "7", str(toml)]
    assert lines["slot_nbytes"] == ["slot_nbytes", "67108864", "bytes", "default"]


def test_json_has_the_same_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--json"]) == 0

    rows = msgspec.json.decode(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(Config.__struct_fields__)


def test_values_are_toml_or_text() -> None:
    assert parse(["num_engines=2", "mode=async", 'include=["a.*"]', "host="]) == {
        "num_engines": 2,
        "mode": "async",
        "include": ["a.*"],
        "host": "",
    }


def test_an_assignment_needs_an_equals_sign() -> None:
    with pytest.raises(ConfigError, match="write NAME=VALUE"):
        parse(["mode"])


def test_a_wrong_setting_ends_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--set", "slot_nbyte=1"]) == 1
    assert "did you mean 'slot_nbytes'?" in capsys.readouterr().err


def test_no_command_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2
    assert "COMMAND" in capsys.readouterr().err
