from __future__ import annotations

from pathlib import Path

import pytest

from wbridge.config import Config, Mode
from wbridge.errors import ConfigError
from wbridge.settings import describe, load, load_secret, non_defaults


def test_without_sources_everything_is_default() -> None:
    config, origins = load({}, {})

    assert config == Config()
    assert set(origins) == set(Config.__struct_fields__)
    assert set(origins.values()) == {"default"}


def test_arguments_beat_environment_beats_file_beats_defaults(tmp_path: Path) -> None:
    toml = tmp_path / "wbridge.toml"
    toml.write_text('mode = "async"\nnum_engines = 5\nnum_slots = 5\ninclude = ["model.*"]\n')

    config, origins = load(
        {"num_engines": 3}, {"WBRIDGE_NUM_ENGINES": "4", "WBRIDGE_NUM_SLOTS": "4", "HOME": "/"}, toml
    )

    assert (config.mode, config.num_engines, config.num_slots, config.local_slots) == (Mode.ASYNC, 3, 4, 2)
    assert config.include == ("model.*",)
    assert origins["num_engines"] == "argument"
    assert origins["num_slots"] == "WBRIDGE_NUM_SLOTS"
    assert origins["mode"] == str(toml)
    assert origins["local_slots"] == "default"


def test_environment_text_is_parsed() -> None:
    config, _ = load(
        {},
        {
            "WBRIDGE_MODE": "sync",
            "WBRIDGE_HEARTBEAT_S": "2",
            "WBRIDGE_INCLUDE": "a.*, b",
            "WBRIDGE_SECRET": "x",
        },
    )

    assert (config.mode, config.heartbeat_s, config.include) == (Mode.SYNC, 2.0, ("a.*", "b"))


def test_arguments_may_be_typed_values() -> None:
    config, _ = load({"mode": Mode.ASYNC, "include": ("a", "b"), "heartbeat_s": 3}, {})

    assert (config.mode, config.include, config.heartbeat_s) == (Mode.ASYNC, ("a", "b"), 3.0)


@pytest.mark.parametrize(
    ("arguments", "environ", "words"),
    [
        ({"slot_nbyte": 1}, {}, ("'slot_nbyte' (argument)", "did you mean 'slot_nbytes'?")),
        ({}, {"WBRIDGE_MODUS": "x"}, ("'modus' (WBRIDGE_MODUS)", "'mode'")),
        ({}, {"WBRIDGE_SLOT_NBYTES": "12x"}, ("slot_nbytes = '12x' (WBRIDGE_SLOT_NBYTES)", "int", "bytes")),
        ({"slot_nbytes": "5"}, {}, ("slot_nbytes = '5' (argument)", "int")),
        ({"mode": "fast"}, {}, ("mode = 'fast' (argument)", "enum")),
        ({"num_slots": 1.5}, {}, ("num_slots = 1.5",)),
        ({"mode": object()}, {}, ("mode = ", "(argument)")),
        ({"slot_nbytes": 0}, {}, ("slot_nbytes = 0", "at least 1", "argument")),
        ({}, {"WBRIDGE_HEARTBEAT_S": "-1"}, ("heartbeat_s = -1.0", "positive", "WBRIDGE_HEARTBEAT_S")),
    ],
)
def test_a_bad_value_is_named_with_its_origin(
    arguments: dict[str, object], environ: dict[str, str], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(arguments, environ)

    for word in words:
        assert word in str(caught.value)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("mode =")

    with pytest.raises(ConfigError, match=r"broken\.toml"):
        load({}, {}, broken)
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        load({}, {}, tmp_path / "absent.toml")


def test_rows_state_value_unit_and_origin() -> None:
    config, origins = load({"include": ["a", "b"]}, {"WBRIDGE_SLOT_NBYTES": "4096"})

    rows = {row.name: row for row in describe(config, origins)}

    assert list(rows) == list(Config.__struct_fields__)
    assert (rows["slot_nbytes"].value, rows["slot_nbytes"].unit) == ("4096", "bytes")
    assert rows["slot_nbytes"].origin == "WBRIDGE_SLOT_NBYTES"
    assert (rows["include"].value, rows["include"].origin) == ("a, b", "argument")
    assert (rows["hold_timeout_s"].unit, rows["mode"].value) == ("seconds", "sync")


def test_the_secret_is_no_setting() -> None:
    assert load_secret({"WBRIDGE_SECRET": "abc"}) == b"abc"
    assert load_secret({}) == b""
    assert "secret" not in Config.__struct_fields__


def test_non_defaults_are_what_the_author_asked_for() -> None:
    assert non_defaults(Config()) == {}
    assert non_defaults(Config(mode=Mode.ASYNC, num_engines=2)) == {"mode": Mode.ASYNC, "num_engines": 2}
