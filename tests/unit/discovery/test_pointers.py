"""Destinations that moved since they were bound are named before a byte goes to dead memory."""

from __future__ import annotations

import pytest
import torch

from wbridge.discovery.pointers import Bindings, bind, owners_of
from wbridge.errors import LayoutError


def bound_model() -> tuple[torch.nn.Module, Bindings]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    parameters = dict(model.named_parameters())
    return model, bind(parameters, owners_of(model, parameters))


def test_c35_nothing_moved_over_three_updates() -> None:
    model, bindings = bound_model()
    for _ in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn_like(parameter))
        bindings.check()
    assert len(bindings) == 4
    assert bindings["0.weight"] is model[0].weight


def test_c33_replaced_parameter_object_is_named() -> None:
    model, bindings = bound_model()
    model[1].weight = torch.nn.Parameter(model[1].weight.detach())
    with pytest.raises(
        LayoutError, match=r"1 of 4 destinations.*'?1\.weight'?: its parameter object was replaced"
    ):
        bindings.check()


def test_c34_replaced_storage_is_named() -> None:
    model, bindings = bound_model()
    model[0].weight.data = model[0].weight.data.clone()
    with pytest.raises(LayoutError, match=r"0\.weight: its storage was replaced"):
        bindings.check()


def test_c35_derived_tensor_without_an_owner_is_watched_too() -> None:
    derived = torch.zeros(4)
    bindings = bind({"absorbed": derived})
    derived.set_(torch.zeros(4).untyped_storage())
    with pytest.raises(LayoutError, match="absorbed: its storage was replaced"):
        bindings.check()


def test_c36_all_moved_tensors_are_counted() -> None:
    model, bindings = bound_model()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    with pytest.raises(LayoutError, match="4 of 4 destinations"):
        bindings.check()


def test_c39_padded_parameter_is_named_with_both_shapes() -> None:
    module = torch.nn.Linear(64, 100, bias=False)
    parameters = dict(module.named_parameters())
    bindings = bind(parameters, owners_of(module, parameters))
    module.weight = torch.nn.Parameter(torch.nn.functional.pad(module.weight.detach(), (0, 0, 0, 28)))
    with pytest.raises(LayoutError, match=r"weight: shape \(100, 64\) became \(128, 64\)"):
        bindings.check()


def test_deleted_parameter_and_changed_dtype_or_strides_are_named() -> None:
    model, bindings = bound_model()
    del model[0].bias
    model[0].weight.data = model[0].weight.data.double()
    model[1].weight.data = model[1].weight.data.as_strided((2, 3), (1, 2))
    with pytest.raises(
        LayoutError, match=r"dtype.*became.*0\.bias: deleted.*strides \(3, 1\) became \(1, 2\)"
    ):
        bindings.check()


def test_unknown_names_have_no_owner() -> None:
    model, _ = bound_model()
    assert owners_of(model, {"nowhere.weight": torch.zeros(1), "0.missing": torch.zeros(1)}) == {}
