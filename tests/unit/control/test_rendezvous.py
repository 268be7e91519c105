from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from wbridge.control.rendezvous import (
    FileRendezvous,
    Meeting,
    TcpRendezvous,
    bind_address,
    choose_secret,
    look_up,
    parse_rendezvous,
    publish,
    withdraw,
)
from wbridge.errors import ConfigError, PeerLost

MEETING = Meeting("127.0.0.1:7717", b"\x00secret\xff")


@pytest.mark.parametrize(
    ("url", "environ", "expected"),
    [
        ("tcp://head:7717", {}, TcpRendezvous("head", 7717)),
        ("tcp://[::1]:7717", {}, TcpRendezvous("::1", 7717)),
        ("file:///run/my%20job", {}, FileRendezvous("/run/my job")),
        ("env://", {"MASTER_ADDR": "head", "MASTER_PORT": "29500"}, TcpRendezvous("head", 29501)),
        (
            "env://",
            {"MASTER_ADDR": "head", "MASTER_PORT": "1", "WBRIDGE_PORT": "7"},
            TcpRendezvous("head", 7),
        ),
    ],
)
def test_the_three_forms(url: str, environ: dict[str, str], expected: object) -> None:
    assert parse_rendezvous(url, environ) == expected


@pytest.mark.parametrize(
    ("url", "environ", "word"),
    [
        ("head:7717", {}, "tcp://host:port"),
        ("http://head:7717", {}, "tcp://host:port"),
        ("tcp://head", {}, "host:port"),
        ("tcp://head:99999", {}, "host:port"),
        ("file://relative", {}, "absolute"),
        ("env://", {}, "MASTER_ADDR"),
        ("env://", {"MASTER_ADDR": "head"}, "WBRIDGE_PORT"),
        ("env://", {"MASTER_ADDR": "head", "WBRIDGE_PORT": "x"}, "'x'"),
    ],
)
def test_a_bad_url_is_refused_with_the_remedy(url: str, environ: dict[str, str], word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_rendezvous(url, environ)
    assert word in str(caught.value)


def test_a_file_carries_address_and_secret_for_its_owner_only(tmp_path: Path) -> None:
    place = FileRendezvous(str(tmp_path / "job"))
    with pytest.raises(PeerLost, match="yet"):
        look_up(place, b"")

    publish(place, MEETING)

    assert look_up(place, b"") == MEETING
    assert look_up(place, b"other").secret == b"other"
    assert stat.S_IMODE(os.stat(place.path).st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["job"]


def test_a_later_coordinator_replaces_the_file_and_keeps_it(tmp_path: Path) -> None:
    place = FileRendezvous(str(tmp_path / "job"))
    later = Meeting("127.0.0.1:1", b"other")
    publish(place, MEETING)
    publish(place, later)

    withdraw(place, MEETING)
    assert look_up(place, b"") == later

    withdraw(place, later)
    withdraw(place, later)
    assert not Path(place.path).exists()


def test_a_file_that_others_may_read_or_that_is_something_else_is_refused(tmp_path: Path) -> None:
    place = FileRendezvous(str(tmp_path / "job"))
    publish(place, MEETING)
    os.chmod(place.path, 0o644)
    with pytest.raises(ConfigError, match="others"):
        look_up(place, b"")

    os.chmod(place.path, 0o600)
    Path(place.path).write_text("hello")
    with pytest.raises(ConfigError, match="no rendezvous file"):
        look_up(place, b"")


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write"):
        publish(FileRendezvous(str(tmp_path / "absent" / "job")), MEETING)


def test_where_a_coordinator_listens_and_with_which_secret() -> None:
    file, local, remote = FileRendezvous("/x"), TcpRendezvous("127.0.0.1", 5), TcpRendezvous("head", 5)

    assert bind_address(file) == ("127.0.0.1", 0)
    assert bind_address(remote) == ("head", 5)
    assert len(choose_secret(file, b"")) == 32
    assert choose_secret(file, b"") != choose_secret(file, b"")
    assert choose_secret(local, b"") == b""
    assert choose_secret(remote, b"mine") == b"mine"
    with pytest.raises(ConfigError, match="WBRIDGE_SECRET"):
        choose_secret(remote, b"")
