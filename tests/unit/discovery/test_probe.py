"""The probe agrees with the trace, touches no live value, and tells copies from arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.models.replay import Weights, assert_exact, bits, from_dict
from wbridge.discovery.probe import probe
from wbridge.discovery.specs import specs_of
from wbridge.discovery.trace import Discovered
from wbridge.errors import LayoutError

WEIGHTS = {"x": torch.randn(8, 6), "y": torch.randn(8, 6), "v": torch.randn(6)}


def probed(
    parameters: dict[str, torch.Tensor],
    load: Callable[[Weights], object],
    buffers: Weights | None = None,
) -> Discovered:
    live = {**parameters, **(buffers or {})}
    before = {name: (bits(t).clone(), t.data_ptr(), t.dtype, t.requires_grad) for name, t in live.items()}
    found = probe(
        checkpoint=specs_of(WEIGHTS), parameters=parameters, load_weights=from_dict(load), buffers=buffers
    )
    for name, tensor in live.items():
        value, *rest = before[name]
        assert torch.equal(bits(tensor), value)
        assert [tensor.data_ptr(), tensor.dtype, tensor.requires_grad] == rest
    return found


def test_fused_transposed_and_padded_parameters() -> None:
    w = {
        "fused": torch.nn.Parameter(torch.full((18, 6), 3.0)),
        "t": torch.ones(6, 8, dtype=torch.bfloat16),
        "view": torch.zeros(6, 8).t(),
        "repeated": torch.zeros(4, 6),
    }

    def load(t: Weights) -> None:
        w["fused"].data[:8].copy_(t["x"])
        w["fused"].data[8:16].copy_(t["y"].view(2, 4, 6).transpose(0, 1).reshape(8, 6))
        w["fused"].data[16:17].fill_(3)  # constants are left to the first load
        w["t"].copy_(t["x"].t().to(w["t"].dtype))
        w["view"].copy_(t["y"])
        w["repeated"].copy_(t["v"])

    found = probed(w, load)
    source_map = assert_exact(found, WEIGHTS, w, load)
    assert (len(source_map.mapped), source_map.method) == (5, "probe")
    assert source_map.unfed == (("fused", 12),)
    assert found.untouched == {"fused": 6}


def test_value_dependent_loader_that_a_trace_refuses() -> None:
    w = {"p": torch.zeros(8, 6)}

    def load(t: Weights) -> None:
        if bool((t["x"] != 0).all()):
            w["p"].copy_(t["x"])

    assert len(assert_exact(probed(w, load), WEIGHTS, w, load).mapped) == 1


@pytest.mark.parametrize(
    "compute", [lambda t: t["x"] + 1, lambda t: t["x"] * 2, lambda t: -t["x"], lambda t: t["x"] + t["y"]]
)
def test_arithmetic_is_refused(compute: Callable[[Weights], torch.Tensor]) -> None:
    w = {"p": torch.zeros(8, 6)}
    with pytest.raises(LayoutError, match=r"'p' does not hold copies.*\(0, 0\).*method='trace'"):
        probed(w, lambda t: w["p"].copy_(compute(t)))


def test_tied_names_are_one_destination_and_buffers_are_restored() -> None:
    shared = torch.nn.Parameter(torch.ones(8, 6))
    w = {"embed": shared, "head": shared}
    buffers = {"bias": torch.full((6,), 2.0), "scale": torch.full((2,), 5.0)}

    def load(t: Weights) -> None:
        w["embed"].data.copy_(t["x"])
        buffers["bias"].copy_(t["v"])
        buffers["scale"].fill_(1)

    source_map = probed(w, load, buffers).source_map
    assert list(source_map.parameters) == ["embed", "bias"]


def test_stale_view_of_live_memory_is_followed_and_not_written() -> None:
    w = {"p": torch.zeros(8, 6)}
    stale = w["p"][:4]

    def load(t: Weights) -> None:
        stale.copy_(t["x"][:4]).add_(0)
        w["p"][4:].copy_(t["y"][4:])

    assert len(assert_exact(probed(w, load), WEIGHTS, w, load).mapped) == 2


def test_parameter_memory_under_another_dtype_is_refused() -> None:
    w = {"p": torch.zeros(8, 6)}
    with pytest.raises(LayoutError, match=r"reads parameter memory as torch.int32.*method='trace'"):
        probed(w, lambda t: w["p"].view(torch.int32).copy_(t["x"]))


def test_failures_restore_the_parameters_and_name_the_remedy() -> None:
    w = {"p": torch.nn.Parameter(torch.ones(8, 6))}
    address = w["p"].data_ptr()

    def load(t: Weights) -> None:
        w["p"].data.copy_(t["missing"])

    with pytest.raises(LayoutError, match=r"KeyError.*method='trace'"):
        probe(checkpoint=specs_of(WEIGHTS), parameters=w, load_weights=from_dict(load))
    assert (w["p"].data_ptr(), w["p"].dtype, w["p"].requires_grad) == (address, torch.float32, True)
    with pytest.raises(LayoutError, match="meta device; only method='trace'"):
        probe(checkpoint={}, parameters={"p": torch.zeros(2, device="meta")}, load_weights=lambda pairs: None)
