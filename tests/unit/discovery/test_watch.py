"""Loaders that use threads: no weight reaches live memory from any of them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.models.replay import Weights, from_dict
from wbridge.config import Config
from wbridge.discovery.discover import discover
from wbridge.discovery.specs import specs_of
from wbridge.layout.source_map import SourceMap

WEIGHTS = {"x": torch.randn(4, 3), "y": torch.randn(4, 3)}


def run(parameters: Weights, load: Callable[[Weights], object], method: str) -> SourceMap:
    return discover(
        checkpoint=specs_of(WEIGHTS),
        parameters=parameters,
        load_weights=from_dict(load),
        config=Config(verify="full"),
        method=method,  # type: ignore[arg-type]  # one of the two
    )


@pytest.mark.parametrize("method", ["trace", "probe"])
def test_threads_of_a_loader(method: str) -> None:
    w = {"p": torch.full((6, 3), 5.0), "q": torch.full((4, 3), 5.0)}

    def load(t: Weights) -> None:
        with ThreadPoolExecutor(2) as pool:
            pool.submit(lambda: w["p"][:4].copy_(t["x"])).result()
            w["p"][4:].fill_(0)
            pool.submit(lambda: w["q"].copy_(t["y"])).result()

    source_map = run(w, load, method)
    assert source_map.unfed == (("p", 6),)
    assert all(bool((tensor == 5).all()) for tensor in w.values())


def test_pool_that_was_there_before() -> None:
    w = {"q": torch.zeros(4, 3)}
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()

        def load(t: Weights) -> None:
            pool.submit(lambda: w["q"].copy_(t["y"][:, :2].repeat(1, 2)[:, 1:])).result()

        for method in ("trace", "probe"):
            run(w, load, method)
            assert not w["q"].any()
        load(WEIGHTS)
    assert w["q"].all()
