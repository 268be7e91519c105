"""Each layout that other systems get wrong: traced, replayed bit for bit, live values untouched."""

from __future__ import annotations

import pytest
import torch

from tests.models.replay import Weights, assert_exact, traced
from wbridge.errors import LayoutError

BF16 = torch.bfloat16
FP8 = torch.float8_e4m3fn


def random(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    torch.manual_seed(sum(shape) + len(shape))
    return torch.randn(*shape).to(dtype)


def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


def test_unfed_buffer_keeps_its_values() -> None:
    weights, w = {"a": random(64, 32)}, {"a": zeros(64, 32), "inv_freq": torch.arange(16.0)}

    def load(t: Weights) -> object:
        return w["a"].copy_(t["a"])

    source_map = assert_exact(traced(weights, w, load), weights, w, load)
    assert source_map.unfed == (("inv_freq", 16),)
    assert w["inv_freq"].sum() == 120


def test_padding_with_values_is_not_part_of_the_map() -> None:
    weights, w = {"a": random(60, 32)}, {"a": torch.ones(64, 32, dtype=BF16)}

    def load(t: Weights) -> object:
        return w["a"][:60].copy_(t["a"])

    source_map = assert_exact(traced(weights, w, load), weights, w, load)
    assert source_map.unfed == (("a", 4 * 32),)
    assert w["a"][60:].sum() == 4 * 32


def test_two_parameters_of_one_tensor() -> None:
    weights, w = {"emb": random(64, 32)}, {"emb": zeros(64, 32), "head": zeros(64, 32)}

    def load(t: Weights) -> None:
        w["emb"].copy_(t["emb"])
        w["head"].copy_(t["emb"])

    source_map = assert_exact(traced(weights, w, load), weights, w, load)
    assert [(m.parameter, m.tensor) for m in source_map.mapped] == [("emb", "emb"), ("head", "emb")]


def test_arithmetic_is_named_with_its_tensor_and_line() -> None:
    weights, w = {"n": random(64)}, {"n": zeros(64)}
    (target,) = traced(weights, w, lambda t: w["n"].copy_(t["n"] + 1)).source_map.opaque
    assert (target.parameter, target.tensors) == ("n", ("n",))
    assert target.operation.startswith("add at test_edge_cases.py:")


@pytest.mark.parametrize(
    ("source", "target"),
    [(BF16, torch.float32), (torch.float32, BF16), (BF16, BF16), (torch.int64, torch.int64), (FP8, FP8)],
)
def test_cast_is_one_region(source: torch.dtype, target: torch.dtype) -> None:
    weights = {"a": (random(30, 20, dtype=torch.float32) * 50).to(source)}
    w = {"a": zeros(30, 20, dtype=torch.float32).to(target)}

    def load(t: Weights) -> object:
        return w["a"].copy_(t["a"])

    assert len(assert_exact(traced(weights, w, load), weights, w, load).mapped) == 1


def test_scalar_has_one_element_and_no_loops() -> None:
    weights, w = {"s": torch.tensor(2.0)}, {"s": torch.zeros(())}

    def load(t: Weights) -> object:
        return w["s"].copy_(t["s"])

    (m,) = assert_exact(traced(weights, w, load), weights, w, load).mapped
    assert m.region.extents == ()


def test_parameter_that_is_a_transposed_view() -> None:
    weights = {f"e{i}": random(16, 24) for i in range(4)}
    w = {"w": zeros(4, 24, 16).transpose(1, 2)}

    def load(t: Weights) -> object:
        return [w["w"][i].copy_(t[f"e{i}"]) for i in range(4)]

    assert len(assert_exact(traced(weights, w, load), weights, w, load).mapped) == 4


def interleave_rows(t: torch.Tensor) -> torch.Tensor:
    return t.view(2, -1, t.shape[1]).transpose(0, 1).reshape(t.shape)


def interleave_columns(t: torch.Tensor) -> torch.Tensor:
    return t.view(t.shape[0], 2, -1).transpose(1, 2).reshape(t.shape)


@pytest.mark.parametrize(
    ("shape", "target", "move"),
    [
        ((48, 32), (32, 48), lambda t: t.t()),
        ((1024, 64), (1024, 64), interleave_rows),
        ((64, 1024), (64, 1024), interleave_columns),
        ((128, 3, 14, 14), (128, 588), lambda t: t.reshape(128, -1)),
        ((128, 3, 14, 14), (128, 3, 14, 14), lambda t: t),
        ((8, 24, 32), (8, 32, 24), lambda t: t.transpose(1, 2)),
        ((64, 32), (128, 32), lambda t: t.repeat(2, 1)),
        ((32,), (4, 32), lambda t: t.expand(4, 32)),
    ],
    ids=["transposed", "row-interleave", "column-interleave", "conv-flat", "conv", "3d", "gqa", "expand"],
)
def test_regular_layout_is_one_region(shape, target, move) -> None:  # type: ignore[no-untyped-def]  # see params
    weights, w = {"x": random(*shape)}, {"x": zeros(*target)}

    def load(t: Weights) -> object:
        return w["x"].copy_(move(t["x"]))

    assert len(assert_exact(traced(weights, w, load), weights, w, load).mapped) == 1


def test_fused_experts_split_over_parameters() -> None:
    weights, w = {"x": random(8, 24, 32)}, {f"x{i}": zeros(24, 32) for i in range(8)}

    def load(t: Weights) -> object:
        return [w[f"x{i}"].copy_(t["x"][i]) for i in range(8)]

    assert len(assert_exact(traced(weights, w, load), weights, w, load).mapped) == 8


def test_swapped_dict_entry_is_refused_and_put_back() -> None:
    w = {"a": zeros(64, 32)}
    before = w["a"]
    with pytest.raises(LayoutError, match=r"replaces 1 parameters.*'a'.*copy into the parameter"):
        traced({"a": random(64, 32)}, w, lambda t: w.update(a=t["a"].clone()))
    assert w["a"] is before


def test_swapped_data_is_refused_and_put_back() -> None:
    w = {"a": torch.nn.Parameter(zeros(64, 32))}
    address = w["a"].data_ptr()

    def load(t: Weights) -> None:
        w["a"].data = t["a"]

    with pytest.raises(LayoutError, match=r"replaces 1 parameters.*'a'"):
        traced({"a": random(64, 32)}, w, load)
    assert w["a"].data_ptr() == address


def test_later_copy_wins() -> None:
    weights, w = {"a": random(16, 16), "b": random(8, 16)}, {"a": zeros(16, 16)}

    def load(t: Weights) -> None:
        w["a"].copy_(t["a"])
        w["a"][4:12].copy_(t["b"])

    source_map = assert_exact(traced(weights, w, load), weights, w, load)
    assert sum(m.region.num_elements for m in source_map.mapped) == 256
    assert sum(m.region.num_elements for m in source_map.mapped if m.tensor == "b") == 128
