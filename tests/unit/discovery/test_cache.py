"""The cache gives back what it was given, and only for exactly the same question."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from tests.models.replay import from_dict
from wbridge.config import Config
from wbridge.discovery.cache import Cache, digest_of
from wbridge.discovery.discover import discover
from wbridge.discovery.specs import specs_of
from wbridge.layout.region import Region, Strided
from wbridge.layout.source_map import Mapped, OpaqueTarget, ParameterSpec, SourceMap, TensorSpec

MAP = SourceMap(
    checkpoint={"a": TensorSpec((2,), "float32")},
    parameters={"p": ParameterSpec((10,), (1,), "float32")},
    mapped=(Mapped("p", "a", Region((2,), Strided(0, (1,)), Strided(4, (2,)))),),
    opaque=(OpaqueTarget("q", ("a",), "add"),),
    atomic=(("a", "b"),),
    unfed=(("p", 3),),
)


def test_map_survives_the_disk(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "deep" / "er")
    assert cache.load("00") is None
    cache.store("00", MAP)
    assert cache.load("00") == MAP
    assert [path.name for path in (tmp_path / "deep" / "er").iterdir()] == ["00.sourcemap"]


def test_damaged_and_foreign_files_count_as_absent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    cache = Cache(tmp_path)
    cache.store("00", MAP)
    data = (tmp_path / "00.sourcemap").read_bytes()
    (tmp_path / "11.sourcemap").write_bytes(data)
    (tmp_path / "22.sourcemap").write_bytes(data[:-7])
    (tmp_path / "33.sourcemap").write_bytes(b"not a map")
    (tmp_path / "44.sourcemap").mkdir()
    assert [cache.load(name) for name in ("11", "22", "33", "44")] == [None] * 4
    assert len(caplog.records) == 4


def test_unwritable_directory_only_costs_the_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    Cache(tmp_path / "file").store("00", MAP)


def load_one(pairs: object) -> None: ...


def load_two(pairs: object) -> int:
    return 2


class Owner:
    def load_weights(self, pairs: object) -> None: ...


def digest(**changes: object) -> str:
    question = {
        "checkpoint": {"a": TensorSpec((2,), "float32")},
        "tensors": {"p": torch.zeros(2), "q": torch.zeros(2)},
        "load_weights": load_one,
        "key": {"mesh": "0/2"},
    }
    return digest_of(**(question | changes))  # type: ignore[arg-type]  # one key is replaced


def test_what_cannot_be_stored_leaves_nothing_behind(tmp_path: Path) -> None:
    in_the_way = tmp_path / "0.sourcemap"
    in_the_way.mkdir()
    Cache(tmp_path).store("0", MAP)
    assert list(tmp_path.iterdir()) == [in_the_way]


def test_digest_depends_on_everything_that_steers_the_loader() -> None:
    shared = torch.zeros(2)
    others = [
        digest(checkpoint={"a": TensorSpec((2,), "bfloat16")}),
        digest(checkpoint={"b": TensorSpec((2,), "float32")}),
        digest(tensors={"p": torch.zeros(2)}),
        digest(tensors={"p": torch.zeros(2), "q": torch.zeros(4)[::2]}),
        digest(tensors={"p": shared, "q": shared}),
        digest(load_weights=load_two),
        digest(load_weights=Owner().load_weights),
        digest(key={"mesh": "1/2"}),
    ]
    assert digest() == digest()
    assert len({digest(), *others}) == len(others) + 1


def test_second_discovery_does_not_run_the_loader(tmp_path: Path) -> None:
    w = {"p": torch.zeros(4)}
    calls = []

    def load(t: object) -> None:
        calls.append(1)
        w["p"].copy_(t["a"])  # type: ignore[index]  # a dict of tensors

    def run(**settings: object) -> SourceMap:
        return discover(
            checkpoint=specs_of({"a": torch.zeros(4)}),
            parameters=w,
            load_weights=from_dict(load),
            config=Config(cache_dir=str(tmp_path)),
            **settings,  # type: ignore[arg-type]  # only `cache_key`
        )

    first = run(cache_key={"rank": "0"})
    assert len(calls) == 2  # trace and verify
    assert run(cache_key={"rank": "0"}) == first
    assert len(calls) == 2
    run(cache_key={"rank": "1"})
    run()  # without a key nothing says what the loader depends on
    assert len(calls) == 6
