"""Destinations that moved since they were bound are named before a byte goes to dead memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import pytest
import torch

from wbridge.config import Config
from wbridge.discovery.discover import discover
from wbridge.discovery.pointers import Bindings, bind, owners_of
from wbridge.discovery.specs import specs_of
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
        LayoutError, match=r"1 of 4 tensors.*'?1\.weight'?: its parameter object was replaced"
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
    with pytest.raises(LayoutError, match="4 of 4 tensors"):
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


class Looking(Mapping[str, torch.Tensor]):
    """Detached tensors of a module, looked up at each access."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.module.get_parameter(name).detach()

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.module.named_parameters())

    def __len__(self) -> int:
        return len(list(self))


def test_mapping_that_looks_tensors_up_needs_no_owners() -> None:
    module = torch.nn.Linear(3, 2)
    bindings = bind(Looking(module), names=["weight"])
    bindings.check()
    module.bias = torch.nn.Parameter(torch.zeros(2))
    bindings.check()
    module.weight = torch.nn.Parameter(torch.zeros(2, 3))
    with pytest.raises(LayoutError, match=r"1 of 1 tensors.*weight: its storage was replaced"):
        bindings.check()


@pytest.mark.parametrize("method", ["trace", "probe"])
def test_discovery_on_a_mapping_that_looks_tensors_up(method: str) -> None:
    module = torch.nn.Linear(3, 2)
    before = module.weight.detach().clone()

    def load_weights(pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in pairs:
            module.get_parameter(name).data.copy_(tensor)

    source_map = discover(
        checkpoint=specs_of(module.state_dict()),
        parameters=Looking(module),
        load_weights=load_weights,
        config=Config(verify="full"),
        method=method,  # type: ignore[arg-type]  # one of the two
    )
    assert {m.parameter for m in source_map.mapped} == {"weight", "bias"}
    assert torch.equal(module.weight, before)


def test_a_source_is_looked_at_in_turns() -> None:
    tensors = {str(i): torch.zeros(2) for i in range(5)}
    bindings = bind(tensors)
    tensors["3"] = torch.zeros(2)
    bindings.check_some(2)
    for _ in range(2):  # and stays there
        with pytest.raises(LayoutError, match=r"1 of 5 tensors \(3: its storage was replaced\).*reconfigure"):
            bindings.check_some(2)
    assert len(bindings.bind_again()) == 5
