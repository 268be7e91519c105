"""A file of the cache is whole or absent, and the cache never stands in the way."""

from __future__ import annotations

from pathlib import Path

from wbridge.cache import Cache


def test_what_was_stored_comes_back_unless_a_part_was_lost(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "not" / "there yet")
    assert cache.load("name") is None
    cache.store("name", b"data")
    assert Cache(tmp_path / "not" / "there yet").load("name") == b"data"
    (path,) = (tmp_path / "not" / "there yet").iterdir()
    for broken in (path.read_bytes()[:-1], b"", b"x" * 100):
        path.write_bytes(broken)
        assert cache.load("name") is None


def test_a_directory_that_cannot_be_written_costs_only_the_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = Cache(tmp_path / "file")
    cache.store("name", b"data")
    assert cache.load("name") is None


def test_what_cannot_be_stored_leaves_nothing_behind(tmp_path: Path) -> None:
    in_the_way = tmp_path / "name"
    in_the_way.mkdir()
    Cache(tmp_path).store("name", b"data")
    assert list(tmp_path.iterdir()) == [in_the_way]
    assert Cache(tmp_path).load("name") is None


def test_without_a_directory_nothing_is_kept() -> None:
    cache = Cache(None)
    cache.store("name", b"data")
    assert cache.load("name") is None
