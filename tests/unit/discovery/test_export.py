"""A traced export says which checkpoint elements each parameter holds."""

from __future__ import annotations

import pytest
import torch

from tests.models.replay import Weights, replay
from wbridge.discovery.export import trace_export
from wbridge.discovery.specs import specs_of
from wbridge.errors import LayoutError

PARAMETERS = {"experts.gate_up": torch.randn(4, 6, 5), "qkv": torch.randn(8, 3), "norm": torch.randn(3)}


def split(t: Weights) -> dict[str, torch.Tensor]:
    exported = {"norm": t["norm"], "q": t["qkv"].view(2, 4, 3)[:, :2].reshape(4, 3)}
    exported["kv"] = torch.cat([t["qkv"].view(2, 4, 3)[:, i] for i in (2, 3)])
    for e, expert in enumerate(t["experts.gate_up"].unbind(0)):
        exported[f"{e}.gate"], exported[f"{e}.up"] = expert.chunk(2)
    return exported


def test_inverse_of_an_export_that_splits_and_reorders() -> None:
    source_map = trace_export(parameters=specs_of(PARAMETERS), export=split)
    assert source_map.checkpoint == specs_of(split(PARAMETERS))
    w = {name: torch.zeros_like(tensor) for name, tensor in PARAMETERS.items()}
    replay(source_map, split(PARAMETERS), w)
    assert all(torch.equal(w[name], PARAMETERS[name]) for name in w)


def test_export_may_be_a_generator() -> None:
    source_map = trace_export(
        parameters=specs_of(PARAMETERS),
        export=lambda t: ((name, tensor.t()) for name, tensor in [("w", t["qkv"])]),
    )
    assert source_map.checkpoint["w"].shape == (3, 8)


@pytest.mark.parametrize(
    ("export", "message"),
    [
        (lambda t: {"n": t["norm"] * 2}, r"'n' is computed \(mul at test_export.py"),
        (lambda t: {"n": torch.nn.functional.pad(t["norm"], (0, 1))}, r"'n' is computed \(a constant\)"),
        (lambda t: {"n": torch.ones(3)}, r"'n' does not come from the parameters"),
        (lambda t: {"n": t["norm"][: int(t["norm"][0].item())]}, "looks at the values"),
    ],
)
def test_exported_values_that_no_parameter_holds_are_refused(export, message) -> None:  # type: ignore[no-untyped-def]  # see params
    with pytest.raises(LayoutError, match=message):
        trace_export(parameters=specs_of(PARAMETERS), export=export)
