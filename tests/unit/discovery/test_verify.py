"""Verify replays the map against one real load on shadows, and names what differs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import msgspec
import pytest
import torch

from tests.models.replay import Weights, bits, from_dict, traced
from wbridge.config import Config
from wbridge.discovery.discover import discover
from wbridge.discovery.shadow import Carried
from wbridge.discovery.specs import specs_of
from wbridge.discovery.verify import verify
from wbridge.errors import LayoutError
from wbridge.layout.region import Region, Strided
from wbridge.layout.source_map import Mapped, SourceMap, TensorSpec

WEIGHTS = {
    f"layers.{i}.{n}": torch.zeros(4, 6, dtype=torch.bfloat16) for i in range(4) for n in ("q", "k", "o")
}


class Model:
    """Four layers with a fused and a plain parameter; counts how often real data arrives."""

    def __init__(self) -> None:
        self.parameters = {f"{i}.qk": torch.full((8, 6), 9.0) for i in range(4)}
        self.parameters |= {f"{i}.o": torch.full((6, 4), 9.0) for i in range(4)}
        self.real: list[str] = []

    def load(self, t: Weights) -> None:
        self.real += [name for name, tensor in t.items() if isinstance(tensor, Carried)]
        for i in range(4):
            self.parameters[f"{i}.qk"][:4] = t[f"layers.{i}.q"]
            self.parameters[f"{i}.qk"][4:] = t[f"layers.{i}.k"]
            self.parameters[f"{i}.o"][:] = t[f"layers.{i}.o"].t()


def test_sample_has_every_class_and_leaves_live_values_alone() -> None:
    model = Model()
    source_map = traced(WEIGHTS, model.parameters, model.load).source_map
    model.real.clear()
    count = verify(source_map=source_map, parameters=model.parameters, load_weights=from_dict(model.load))
    assert count == 3
    assert model.real == ["layers.0.q", "layers.0.k", "layers.0.o"]
    assert all(bool((tensor == 9).all()) for tensor in model.parameters.values())


def test_full_uses_all_tensors_and_leaves_live_values_alone() -> None:
    model = Model()
    source_map = traced(WEIGHTS, model.parameters, model.load).source_map
    model.real.clear()
    verify(
        source_map=source_map, parameters=model.parameters, load_weights=from_dict(model.load), amount="full"
    )
    assert len(model.real) == 12
    assert all(bool((tensor == 9).all()) for tensor in model.parameters.values())


def test_wrong_map_is_refused_with_parameter_and_index() -> None:
    w = {"p": torch.zeros(6, 6)}

    def load(t: Weights) -> object:
        return w["p"].copy_(t["x"])

    right = traced({"x": torch.zeros(6, 6)}, w, load).source_map
    wrong = Mapped("p", "x", Region((6, 6), Strided(0, (1, 6)), Strided(0, (6, 1))))
    with pytest.raises(
        LayoutError,
        match=r"wrong for parameter 'p': element \(0, 1\) should hold .* of checkpoint tensor 'x'",
    ):
        verify(
            source_map=msgspec.structs.replace(right, mapped=(wrong,)),
            parameters=w,
            load_weights=from_dict(load),
        )
    assert not w["p"].any()


def test_loader_that_mixes_sampled_tensors_with_others_is_replayed_in_full() -> None:
    weights = {f"{i}.w": torch.zeros(2, 3) for i in range(5)}
    w = {f"{i}.p": torch.zeros(2, 3) for i in range(5)}
    real: list[int] = []

    def load(t: Weights) -> None:
        stacked = torch.stack([t[f"{i}.w"] for i in range(5)])
        real.append(sum(isinstance(tensor, Carried) for tensor in t.values()))
        for i in range(5):
            w[f"{i}.p"].copy_(stacked[i])

    source_map = traced(weights, w, load).source_map
    assert verify(source_map=source_map, parameters=w, load_weights=from_dict(load)) == 5
    assert real == [0, 1, 5]


def test_every_dtype_is_compared_bit_for_bit() -> None:
    dtypes = (
        torch.float64,
        torch.float16,
        torch.float8_e5m2,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.complex64,
    )
    weights = {str(dtype): torch.zeros(3, 2, dtype=dtype) for dtype in dtypes} | {"s": torch.zeros(())}
    w = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}

    def load(t: Weights) -> object:
        return [w[name].copy_(t[name]) for name in w]

    source_map = traced(weights, w, load).source_map
    assert verify(source_map=source_map, parameters=w, load_weights=from_dict(load), amount="full") == 8


def test_opaque_targets_are_not_compared_and_meta_parameters_skipped() -> None:
    w = {"p": torch.ones(2), "q": torch.ones(2)}

    def load(t: Weights) -> None:
        w["p"].copy_(t["x"] * 2)
        w["q"].copy_(t["x"])

    source_map = traced({"x": torch.zeros(2)}, w, load).source_map
    assert verify(source_map=source_map, parameters=w, load_weights=from_dict(load)) == 1
    assert torch.equal(bits(w["p"]), bits(torch.ones(2)))
    meta = {name: tensor.to("meta") for name, tensor in w.items()}
    assert verify(source_map=source_map, parameters=meta, load_weights=from_dict(load)) == 0


def test_loader_that_rejects_random_data_is_named_with_the_remedy() -> None:
    w = {"p": torch.ones(2)}

    def load(t: Weights) -> object:
        if isinstance(t["x"], Carried):
            raise ValueError("not a probability")
        return w["p"].copy_(t["x"])

    source_map = traced({"x": torch.zeros(2)}, w, load).source_map
    with pytest.raises(LayoutError, match=r"random data: ValueError: not a probability.*verify = 'off'"):
        verify(source_map=source_map, parameters=w, load_weights=from_dict(load))
    assert torch.equal(w["p"], torch.ones(2))


def module_with_buffer() -> tuple[torch.nn.Module, Callable[[Iterable[tuple[str, torch.Tensor]]], None]]:
    """Tied weights, so that all is replayed, and a buffer that the loader fills as well."""
    module = torch.nn.Sequential(torch.nn.Embedding(5, 2), torch.nn.Linear(2, 5, bias=False))
    module[1].weight = module[0].weight
    module.register_buffer("scale", torch.ones(3))
    tensors = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            tensors[name].data.copy_(weight)

    return module, load


@pytest.mark.parametrize("amount", ["sample", "full"])
def test_a_tensor_that_nobody_named_is_named_and_keeps_its_values(amount: str) -> None:
    module, load = module_with_buffer()
    named, settings = dict(module.named_parameters()), {"verify": amount}

    def find(
        parameters: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor] | None = None,
        **more: object,
    ) -> SourceMap:
        config = msgspec.convert(settings | more, Config)
        return discover(
            checkpoint=specs_of(module.state_dict()),
            parameters=parameters,
            buffers=buffers,
            load_weights=load,
            config=config,
        )

    with pytest.raises(LayoutError, match=r"'scale' \(3\).*`buffers`.*`include`"):
        find(named)
    for source_map in (find(named, dict(module.named_buffers())), find(named | dict(module.named_buffers()))):
        assert "scale" in {mapped.parameter for mapped in source_map.mapped}
    assert "scale" not in find(named, include=["0.*", "1.*"]).checkpoint
    assert module.scale.eq(1).all()


def test_buffers_of_the_loaders_own_are_nobodys_business() -> None:
    kept, parameters = torch.zeros(4), {"w": torch.zeros(2, 4)}

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, weight in weights:
            cycle: list[object] = [torch.zeros(4)]
            cycle.append(cycle)
            cycle[0].copy_(weight[0])  # type: ignore[attr-defined]  # a tensor
            kept.copy_(weight[1])
            parameters["w"][0].copy_(cycle[0])  # type: ignore[arg-type]  # as above
            parameters["w"][1].copy_(kept)

    source_map = discover(
        checkpoint={"w": TensorSpec((2, 4), "float32")},
        parameters=parameters,
        load_weights=load,
        config=Config(verify="full"),
    )
    assert sum(mapped.region.num_elements for mapped in source_map.mapped) == 8
    assert not kept.any()


def test_a_checkpoint_tensor_that_ends_up_nowhere_is_told(caplog: pytest.LogCaptureFixture) -> None:
    parameters = {"w": torch.zeros(2, 4)}

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, weight in weights:
            parameters["w"].copy_(weight)

    spec = TensorSpec((2, 4), "float32")
    source_map = discover(
        checkpoint={"first": spec, "second": spec}, parameters=parameters, load_weights=load, config=Config()
    )
    assert {mapped.tensor for mapped in source_map.mapped} == {"second"}
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == ["first"]
    caplog.clear()
    discover(checkpoint={"first": spec}, parameters=parameters, load_weights=load, config=Config())
    assert not caplog.records
