"""The trace: which operators it follows, which it names, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # torch's own convention

from tests.models.replay import Weights, assert_exact, from_dict, traced
from wbridge.discovery.specs import specs_of
from wbridge.discovery.trace import trace
from wbridge.errors import LayoutError


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"x": torch.randn(8, 6), "y": torch.randn(8, 6), "v": torch.randn(6)}


def stacked_then_viewed(t: Weights) -> torch.Tensor:
    return torch.stack([t["x"], t["y"]]).transpose(0, 1).reshape(16, 6)[3:11]


def through_a_buffer(t: Weights) -> torch.Tensor:
    staging = torch.zeros(10, 6)
    staging[:8] = t["x"]
    staging[2:4].copy_(t["y"][:2])
    return staging[:8]


def through_a_new_tensor(t: Weights) -> torch.Tensor:
    staging = t["x"].new_zeros(8, 6)
    staging[:, :3] = t["y"][:, 3:]
    staging[:, 3:] = t["x"][:, :3]
    return staging


def edited_in_place(t: Weights) -> torch.Tensor:
    t["x"][2:4] = t["y"][:2]
    return t["x"]


@pytest.mark.parametrize(
    "move",
    [
        lambda t: torch.cat([t["x"][:4], t["y"][4:]]),
        lambda t: torch.cat([t["x"][:, ::2], t["y"][:, 1::2]], 1),
        stacked_then_viewed,
        lambda t: t["x"].t().contiguous().view(8, 6),
        lambda t: t["x"].clone().double().float(),
        lambda t: t["x"].to(torch.float64).t().reshape(8, 6),
        lambda t: torch.index_select(t["x"], 0, torch.tensor([7, 5, 3, 1, 0, 2, 4, 6])),
        lambda t: t["x"][torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])],
        lambda t: t["x"][:, [5, 4, 3, 2, 1, 0]],
        lambda t: t["x"][torch.tensor([True, False] * 4)].repeat(2, 1),
        lambda t: F.pad(t["x"][:6, :4], (1, 1, 0, 2)),
        lambda t: t["v"].repeat(8, 1),
        lambda t: t["v"].expand(8, 6),
        lambda t: t["x"][:4].repeat_interleave(2, 0),
        lambda t: torch.cat(t["x"].chunk(2)[::-1]),
        lambda t: torch.stack(t["x"].unbind(1), 1),
        lambda t: torch.cat(
            [p for pair in zip(t["x"].split(2), t["y"].split(2), strict=False) for p in pair]
        )[::2],
        lambda t: t["x"].flip(0),
        lambda t: t["x"].roll(3, 0),
        lambda t: t["x"].view(2, 4, 6).permute(1, 0, 2).flatten(0, 1),
        lambda t: t["x"].unsqueeze(0).squeeze(0).movedim(0, 1).reshape(8, 6),
        lambda t: t["x"].unfold(0, 4, 2)[1:3].reshape(8, 6),
        through_a_buffer,
        through_a_new_tensor,
        edited_in_place,
    ],
)
def test_moved_elements_are_followed(move: Callable[[Weights], torch.Tensor]) -> None:
    w = {"p": torch.full((8, 6), 0.0)}

    def load(t: Weights) -> object:
        return w["p"].copy_(move({name: tensor.clone() for name, tensor in t.items()}))

    source_map = assert_exact(traced(weights(), w, load), weights(), w, load)
    assert not source_map.opaque


@pytest.mark.parametrize(
    "put",
    [
        lambda p, t: p.index_copy_(0, torch.tensor([3, 1]), t["x"][:2]),
        lambda p, t: p.__setitem__(torch.tensor([6, 4, 2, 0]), t["x"][:4]),
        lambda p, t: p.__setitem__(slice(2, 5), t["x"][:3]),
        lambda p, t: torch.cat([t["x"][:4], t["y"][4:]], out=p),
        lambda p, t: torch._foreach_copy_([p[:4], p[4:]], [t["y"][:4], t["x"][:4]]),
        lambda p, t: p.view(-1)[:12].copy_(t["x"].view(-1)[::4]),
        lambda p, t: p.copy_(t["v"]),
        lambda p, t: p.fill_(t["v"][2]),
    ],
)
def test_ways_to_write_a_parameter(put: Callable[[torch.Tensor, Weights], object]) -> None:
    w = {"p": torch.nn.Parameter(torch.ones(8, 6), requires_grad=False)}

    def load(t: Weights) -> object:
        return put(w["p"].data, t)

    assert not assert_exact(traced(weights(), w, load), weights(), w, load).opaque


@pytest.mark.parametrize(
    ("compute", "operation", "tensors"),
    [
        (lambda t: t["x"] * 2, "mul", {"x"}),
        (lambda t: t["x"].float() * t["y"], "mul", {"x", "y"}),
        (lambda t: torch.cat([t["x"][:4], t["y"][4:].neg()]), "neg", {"x", "y"}),
        (lambda t: t["x"] @ torch.eye(6), "mm", {"x"}),
        (lambda t: t["x"].cumsum(0), "cumsum", {"x"}),
        (lambda t: torch.where(t["x"] > 0, t["x"], t["y"]), "where", {"x", "y"}),
        (lambda t: t["x"].view(torch.int32), "view", {"x"}),
        (lambda t: t["x"][t["v"].argsort()[:1].repeat(8)], "index", {"x", "v"}),
        (lambda t: t["x"].to(torch.float16).float(), "cast float32 -> float16 -> float32", {"x"}),
    ],
)
def test_arithmetic_makes_the_parameter_opaque(
    compute: Callable[[Weights], torch.Tensor], operation: str, tensors: set[str]
) -> None:
    w = {"p": torch.zeros(8, 6), "q": torch.zeros(8, 6)}

    def load(t: Weights) -> None:
        w["p"].copy_(compute(t))
        w["q"].copy_(t["x"])

    source_map = traced(weights(), w, load).source_map
    (target,) = source_map.opaque
    assert (target.parameter, set(target.tensors)) == ("p", tensors)
    assert target.operation.startswith(operation)
    assembled = {f"@{tensor}" for tensor in tensors}
    assert {m.parameter for m in source_map.mapped} == assembled | {"q"}
    assert assembled <= set(source_map.parameters)


@pytest.mark.parametrize(
    "change",
    [
        lambda p, t: p.add_(t["x"]),
        lambda p, t: p.mul_(2),
        lambda p, t: p[2:4].clamp_(0, 1),
        lambda p, t: p.neg_(),
    ],
)
def test_arithmetic_in_place_on_a_parameter(change: Callable[[torch.Tensor, Weights], object]) -> None:
    w = {"p": torch.ones(8, 6)}

    def load(t: Weights) -> None:
        w["p"].copy_(t["y"])
        change(w["p"], t)

    (target,) = traced(weights(), w, load).source_map.opaque
    assert "y" in target.tensors
    assert torch.equal(w["p"], torch.ones(8, 6))


def test_arithmetic_that_is_overwritten_does_not_count() -> None:
    w = {"p": torch.ones(8, 6)}

    def load(t: Weights) -> None:
        w["p"].copy_(t["y"]).mul_(3)
        w["p"].copy_(t["x"])

    assert not assert_exact(traced(weights(), w, load), weights(), w, load).opaque


def test_constants_of_the_loader_are_not_executed_and_not_mapped() -> None:
    w = {"p": torch.full((12, 6), 7.0)}

    def load(t: Weights) -> None:
        w["p"].zero_()
        w["p"][:8].copy_(t["x"])
        w["p"][8:].fill_(0.5)
        w["p"][0].copy_(torch.ones(6))

    found = traced(weights(), w, load)
    assert found.source_map.unfed == (("p", 30),)
    assert not found.untouched


def test_what_no_one_sets_is_counted() -> None:
    w = {"p": torch.zeros(12, 6), "q": torch.zeros(3)}
    assert traced(weights(), w, lambda t: w["p"][:8].copy_(t["x"])).untouched == {"p": 24, "q": 3}


@pytest.mark.parametrize(
    "look",
    [
        lambda t: bool((t["x"] > 0).all()),
        lambda t: t["v"][0].item(),
        lambda t: torch.equal(t["x"], t["y"]),
        lambda t: t["x"].nonzero(),
        lambda t: t["x"][t["x"] > 0],
        lambda t: float(t["v"].max()),
    ],
)
def test_looking_at_values_is_refused_with_the_remedy(look: Callable[[Weights], object]) -> None:
    w = {"p": torch.zeros(8, 6)}

    def load(t: Weights) -> None:
        look(t)
        w["p"].copy_(t["x"])

    with pytest.raises(
        LayoutError, match=r"values of checkpoint tensor '[xv]'.*test_trace.py:.*method='probe'"
    ):
        traced(weights(), w, load)


def test_refusal_survives_a_loader_that_swallows_it() -> None:
    w = {"p": torch.zeros(8, 6)}

    def load(t: Weights) -> None:
        try:
            t["v"][0].item()
        except Exception:
            w["p"].copy_(t["x"])

    with pytest.raises(LayoutError, match="looks at the values"):
        traced(weights(), w, load)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda p, t: p.resize_(2, 2), "p"),
        (lambda p, t: p.set_(t["x"]), "p"),
        (lambda p, t: p.t_(), "p"),
        (lambda p, t: t["x"].unsqueeze_(0), "x"),
    ],
)
def test_changed_storage_or_shape_is_refused(
    change: Callable[[torch.Tensor, Weights], object], name: str
) -> None:
    w = {"p": torch.zeros(8, 6)}
    with pytest.raises(LayoutError, match=rf"changes the storage or shape of '{name}'"):
        traced(weights(), w, lambda t: change(w["p"], t))
    assert w["p"].shape == (8, 6)


def test_foreign_error_is_translated_with_the_remedy() -> None:
    def load(t: Weights) -> None:
        raise KeyError("no such layer")

    with pytest.raises(LayoutError, match=r"KeyError.*no such layer.*method='probe'"):
        traced(weights(), {"p": torch.zeros(8, 6)}, load)


def test_bytes_written_through_another_dtype_are_opaque() -> None:
    w = {"p": torch.zeros(8, 6)}

    def load(t: Weights) -> object:
        return w["p"].view(torch.int32).copy_(t["x"].view(torch.int32))

    (target,) = traced(weights(), w, load).source_map.opaque
    assert (target.parameter, target.tensors) == ("p", ("x",))


def test_parameters_in_one_arena_are_told_apart() -> None:
    arena = torch.zeros(40, dtype=torch.float32)
    w = {"a": arena[:12].view(2, 6), "b": arena[12:36].view(6, 4).t(), "c": arena[36:]}

    def load(t: Weights) -> None:
        w["a"].copy_(t["x"][:2])
        w["b"].copy_(t["y"].view(-1)[:24].view(4, 6))
        arena[36:38].copy_(t["v"][:2])

    found = traced(weights(), w, load)
    assert_exact(found, weights(), w, load)
    assert found.untouched == {"c": 2}


def test_parameters_on_the_meta_device() -> None:
    w = {"p": torch.zeros(8, 6, device="meta"), "q": torch.zeros(6, 8, device="meta")}

    def load(t: Weights) -> None:
        w["p"][:, :3].copy_(t["x"][:, 3:].to(w["p"].device))
        w["p"][:, 3:].copy_(t["y"][:, 3:])
        w["q"].copy_(t["x"].t())

    found = trace(checkpoint=specs_of(weights()), parameters=w, load_weights=from_dict(load))
    assert [m.region.num_elements for m in found.source_map.mapped] == [24, 24, 48]
    assert not found.untouched


def test_empty_shard_is_a_parameter_without_regions() -> None:
    w = {"p": torch.zeros(0, 6), "q": torch.zeros(8, 6)}

    def load(t: Weights) -> None:
        w["p"].copy_(t["x"][8:])
        w["q"].copy_(t["y"])

    source_map = assert_exact(traced(weights(), w, load), weights(), w, load)
    assert [m.parameter for m in source_map.mapped] == ["q"]
    assert set(source_map.parameters) == {"p", "q"}


def test_later_copy_into_a_tensor_that_was_read_changes_nothing() -> None:
    w = {"p": torch.zeros(8, 6), "q": torch.zeros(8, 6)}

    def load(t: Weights) -> None:
        w["p"].copy_(t["x"])
        w["q"].copy_(w["p"])  # from the live parameter, as it would be by now
        w["p"].copy_(t["y"])

    source_map = assert_exact(traced(weights(), w, load), weights(), w, load)
    assert [(m.parameter, m.tensor) for m in source_map.mapped] == [("p", "y"), ("q", "x")]


def test_loader_in_a_thread_of_its_own_is_followed() -> None:
    from concurrent.futures import ThreadPoolExecutor

    w = {"p": torch.zeros(8, 6)}

    def load(t: Weights) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: w["p"].copy_(t["x"].t().reshape(8, 6))).result()

    assert_exact(traced(weights(), w, load), weights(), w, load)


OPTIMIZED = """
import torch
from wbridge.discovery.specs import specs_of
from wbridge.discovery.trace import trace
assert False, "this must not run"
p = {"p": torch.ones(4), "q": torch.ones(4)}
def load(pairs):
    t = dict(pairs)
    p["p"].copy_(t["x"] + 1)
    p["q"].copy_(t["x"])
    p["q"].mul_(2)
found = trace(checkpoint=specs_of({"x": torch.zeros(4)}), parameters=p, load_weights=load)
for target in found.source_map.opaque:
    print(target.parameter, target.operation.split()[0], *target.tensors)
print(p["p"].sum().item(), p["q"].sum().item())
"""


@pytest.mark.process
def test_arithmetic_is_found_without_assertions() -> None:
    done = subprocess.run(
        [sys.executable, "-O", "-c", OPTIMIZED], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split("\n")[:3] == ["p add x", "q mul_ x", "4.0 4.0"]


def test_values_made_without_the_checkpoint_are_constants() -> None:
    w = {"p": torch.full((8, 6), 7.0), "q": torch.zeros(8, 6)}

    def load(t: Weights) -> None:
        w["p"].copy_(torch.zeros_like(t["x"]) + 2)
        w["q"].copy_(t["x"])

    found = traced(weights(), w, load)
    assert (found.source_map.opaque, found.untouched) == ((), {})
    assert found.source_map.unfed == (("p", 48),)
