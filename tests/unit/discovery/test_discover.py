"""Public failures of weight correspondence, by their case numbers: whole discoveries on small loaders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import pytest
import torch

from tests.models.replay import Weights, bits, from_dict, replay
from wbridge.config import Config
from wbridge.discovery.discover import discover
from wbridge.discovery.pointers import owners_of
from wbridge.discovery.specs import specs_of
from wbridge.errors import CoverageError, LayoutError
from wbridge.layout.source_map import SourceMap

BF16 = torch.bfloat16


def run(
    weights: Weights,
    parameters: Mapping[str, torch.Tensor],
    load: Callable[[Weights], object],
    **settings: object,
) -> SourceMap:
    """Discover with full verification; the rest of the settings go to `Config` or `discover`."""
    own = {name: settings.pop(name) for name in ("buffers", "owners", "atomic", "method") if name in settings}
    return discover(
        checkpoint=specs_of(weights),
        parameters=parameters,
        load_weights=from_dict(load),
        config=Config(verify="full", **settings),  # type: ignore[arg-type]  # settings by name
        **own,  # type: ignore[arg-type]  # arguments by name
    )


def updated(source_map: SourceMap, weights: Weights, parameters: Weights) -> None:
    replay(source_map, weights, parameters)


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype)


def test_c01_c02_tied_weights_follow_the_loader_even_when_only_one_name_travels() -> None:
    weights = {"embed": torch.randn(6, 2)}
    apart = {"embed": ones(6, 2), "head": ones(6, 2)}

    def load_both(t: Weights) -> None:
        apart["embed"].copy_(t["embed"])
        apart["head"].copy_(t["embed"])

    updated(run(weights, apart, load_both, include=("embed",)), weights, apart)
    assert torch.equal(apart["embed"], apart["head"])
    assert torch.equal(apart["head"], weights["embed"])


def test_c01_one_storage_under_two_names_is_written_once() -> None:
    shared = torch.nn.Parameter(ones(6, 2))
    tied = {"embed": shared, "head": shared}
    source_map = run({"embed": torch.randn(6, 2)}, tied, lambda t: shared.copy_(t["embed"]))
    assert [m.parameter for m in source_map.mapped] == ["embed"]
    assert list(source_map.parameters) == ["embed"]


def test_c03_equal_shapes_are_never_tied_by_name() -> None:
    weights = {"embed": torch.randn(6, 2), "lm_head": torch.randn(6, 2)}
    w = {"embed": ones(6, 2), "lm_head": ones(6, 2)}
    updated(run(weights, w, lambda t: [w[n].copy_(t[n]) for n in w]), weights, w)
    assert not torch.equal(w["embed"], w["lm_head"])


@pytest.mark.parametrize("rank", range(4))
def test_c04_vocabulary_padding_with_an_uneven_last_shard(rank: int) -> None:
    weights = {"embed": torch.randn(1003, 3)}
    w = {"embed": torch.full((256, 3), 5.0)}

    def load(t: Weights) -> None:
        part = t["embed"][rank * 256 : (rank + 1) * 256]
        w["embed"][: len(part)].copy_(part)

    source_map = run(weights, w, load, allow_unfed=("embed",))
    assert source_map.unfed == ((("embed", 21 * 3),) if rank == 3 else ())
    updated(source_map, weights, w)
    assert torch.equal(w["embed"][:235], weights["embed"][rank * 256 : rank * 256 + 235])
    assert rank < 3 or bool((w["embed"][235:] == 5).all())


@pytest.mark.parametrize(("heads", "ranks", "head"), [(8, 16, 4), (2, 4, 8)], ids=["c06", "c07"])
def test_c06_c07_replicated_kv_heads_follow_the_loader_not_divisibility(
    heads: int, ranks: int, head: int
) -> None:
    weights = {"k": torch.randn(heads * head, 6), "k_norm": torch.randn(heads * head)}
    for rank in range(ranks):
        w = {"k": ones(head, 6), "k_norm": ones(head)}
        mine = slice(rank * heads // ranks * head, (rank * heads // ranks + 1) * head)

        def load(t: Weights, w: Weights = w, mine: slice = mine) -> None:
            w["k"].copy_(t["k"][mine])
            w["k_norm"].copy_(t["k_norm"][mine])

        updated(run(weights, w, load), weights, w)
        assert torch.equal(w["k"], weights["k"][mine])
        assert torch.equal(w["k_norm"], weights["k_norm"][mine])


def test_c08_fused_replicated_and_scaled_together() -> None:
    head = 2
    weights = {n: torch.randn(h * head, 4).to(torch.float8_e4m3fn) for n, h in (("q", 4), ("k", 2), ("v", 2))}
    weights |= {f"{n}_scale": torch.rand(len(t) // 2, 2) for n, t in weights.items()}
    for rank in range(4):
        w = {"qkv": ones(3 * head, 4).to(torch.float8_e4m3fn), "qkv_scale": ones(3, 2)}
        rows = {"q": rank, "k": rank // 2, "v": rank // 2}

        def load(t: Weights, w: Weights = w, rows: Mapping[str, int] = rows) -> None:
            for i, (n, at) in enumerate(rows.items()):
                w["qkv"][i * head : (i + 1) * head].copy_(t[n][at * head : (at + 1) * head])
                w["qkv_scale"][i].copy_(t[f"{n}_scale"][at])

        expected = torch.cat(
            [weights[n].view(torch.uint8)[r * head : (r + 1) * head] for n, r in rows.items()]
        )
        updated(run(weights, w, load), weights, w)
        assert torch.equal(w["qkv"].view(torch.uint8), expected)
        assert torch.equal(w["qkv_scale"], torch.stack([weights[f"{n}_scale"][r] for n, r in rows.items()]))


def test_c09_c10_loader_that_needs_several_tensors_in_one_call() -> None:
    weights = {f"experts.{e}": torch.randn(3, 2) for e in range(4)}
    w = {"experts": ones(4, 3, 2)}

    def load(t: Weights) -> None:
        if len(t) != 4:
            raise RuntimeError("incomplete experts")
        w["experts"].copy_(torch.stack([t[f"experts.{e}"] for e in range(4)]))

    source_map = run(weights, w, load, atomic=[tuple(weights)])
    assert source_map.atomic == (tuple(weights),)
    updated(source_map, weights, w)
    assert torch.equal(w["experts"], torch.stack(list(weights.values())))


def test_c12_replay_does_not_grow_with_a_name_table() -> None:
    weights = {f"experts.{e}": torch.zeros(2) for e in range(500)}
    w = {"experts": ones(500, 2)}
    source_map = run(weights, w, lambda t: [w["experts"][e].copy_(t[f"experts.{e}"]) for e in range(500)])
    assert len(source_map.mapped) == 500


def swallowing(parameters: Mapping[str, torch.Tensor]) -> Callable[[Weights], object]:
    return lambda t: [parameters[n].copy_(x) for n, x in t.items() if n in parameters]


def test_c13_c15_names_that_match_nothing_are_counted_and_named() -> None:
    weights = {f"model.{n}": torch.randn(2) for n in "abcd"}
    w = {n: ones(2) for n in "abcd"}
    with pytest.raises(
        CoverageError, match=r"4 of 4 parameters.*'a' \(2 elements\).*4 of 4 checkpoint tensors.*'model\.a'"
    ):
        run(weights, w, swallowing(w))


def test_c13_loader_that_renames_everything() -> None:
    weights = {f"model.{n}": torch.randn(2) for n in "abcd"}
    w = {n: ones(2) for n in "abcd"}
    updated(run(weights, w, lambda t: [w[n[6:]].copy_(x) for n, x in t.items()]), weights, w)
    assert all(torch.equal(w[n], weights[f"model.{n}"]) for n in w)


def test_c14_fused_destination_with_one_missing_expert_is_refused() -> None:
    weights = {f"experts.{e}.up": torch.randn(2, 3) for e in range(3)}
    w = {"experts.w13": ones(4, 2, 3), "norm": ones(3)}

    def load(t: Weights) -> object:
        return [w["experts.w13"][e].copy_(t[f"experts.{e}.up"]) for e in range(3)]

    with pytest.raises(
        CoverageError, match=r"2 of 2 parameters.*'experts.w13' \(6 elements\), 'norm' \(3 elements\)"
    ):
        run(weights, w, load)
    source_map = run(weights, w, load, allow_unfed=("experts.*", "norm"))
    assert source_map.unfed == (("experts.w13", 6), ("norm", 3))


def test_c15_loader_that_asserts_the_set_it_loaded() -> None:
    weights = {"a": torch.randn(2), "b": torch.randn(2)}
    w = {"a": ones(2), "b": ones(2)}

    def load(t: Weights) -> set[str]:
        loaded = {n for n in w if w[n].copy_(t[n]) is w[n]}
        assert loaded == set(t)
        return loaded

    updated(run(weights, w, load), weights, w)


def test_c16_two_naming_schemes_and_an_untouched_tower() -> None:
    weights = {"model.layers.0.w": torch.randn(3)}
    w = {"language_model.model.layers.0.w": ones(3), "vision.w": ones(2)}

    def load(pairs: Weights) -> None:
        for name, tensor in pairs.items():
            w[f"language_model.{name}"].copy_(tensor)

    with pytest.raises(CoverageError, match=r"'vision\.w'"):
        run(weights, w, load)
    updated(run(weights, w, load, allow_unfed=("vision.*",)), weights, w)
    assert torch.equal(w["language_model.model.layers.0.w"], weights["model.layers.0.w"])
    assert bool((w["vision.w"] == 1).all())


def test_c19_c26_dtype_of_each_pair_is_its_own() -> None:
    weights = {"adapter": torch.randn(4, 3), "router": torch.randn(4, 3), "w": torch.randn(4, 3).to(BF16)}
    w = {"adapter": ones(4, 3, dtype=BF16), "router": ones(4, 3), "w": ones(4, 3, dtype=BF16)}
    source_map = run(weights, w, lambda t: [w[n].copy_(t[n]) for n in w])
    assert {n: spec.dtype for n, spec in source_map.parameters.items()} == {
        "adapter": "bfloat16", "router": "float32", "w": "bfloat16"
    }  # fmt: skip
    updated(source_map, weights, w)
    assert torch.equal(w["router"], weights["router"])
    assert torch.equal(w["adapter"], weights["adapter"].to(BF16))


def test_c24_strides_on_both_sides() -> None:
    weights = {"t": torch.randn(6, 4), "e": torch.randn(1, 4), "p": torch.randn(2, 3, 4)}
    w = {"t": torch.zeros(8, 6).t()[:, ::2], "e": ones(5, 4), "p": torch.zeros(4, 2, 3).permute(1, 2, 0)}

    def load(t: Weights) -> None:
        w["t"].copy_(t["t"])
        w["e"].copy_(t["e"].expand(5, 4))
        w["p"].copy_(t["p"])

    updated(run(weights, w, load), weights, w)
    assert torch.equal(w["t"], weights["t"])
    assert torch.equal(w["e"], weights["e"].expand(5, 4))
    assert torch.equal(w["p"], weights["p"])


def test_c27_parameter_that_no_checkpoint_tensor_names_is_refused() -> None:
    weights = {"router.weight": torch.randn(2, 3)}
    w = {"router.weight": ones(2, 3), "router.bias": ones(2)}
    with pytest.raises(
        CoverageError, match=r"1 of 2 parameters.*'router.bias' \(2 elements\); 0 of 1 checkpoint"
    ):
        run(weights, w, swallowing(w))


def test_c28_fed_buffers_are_destinations_and_others_are_left_alone() -> None:
    weights = {"gate.weight": torch.randn(2, 3), "gate.bias": torch.randn(2)}
    w = {"gate.weight": ones(2, 3)}
    buffers = {"gate.bias": ones(2), "rope": torch.full((4,), 3.0)}

    def load(t: Weights) -> None:
        w["gate.weight"].copy_(t["gate.weight"])
        buffers["gate.bias"].copy_(t["gate.bias"])
        buffers["rope"].mul_(2)

    source_map = run(weights, w, load, buffers=buffers)
    assert set(source_map.parameters) == {"gate.weight", "gate.bias"}
    assert source_map.unfed == ()
    assert bool((buffers["rope"] == 3).all())
    assert bool((buffers["gate.bias"] == 1).all())


def test_c29_frozen_tensors_stay_out() -> None:
    weights = {f"layers.{i}.{n}": torch.randn(3) for i in range(5) for n in ("q", "k")}
    w = {f"layers.{i}.qk": ones(6) for i in range(5)}

    def load(t: Weights) -> None:
        for i in range(5):
            w[f"layers.{i}.qk"][:3].copy_(t[f"layers.{i}.q"])
            w[f"layers.{i}.qk"][3:].copy_(t[f"layers.{i}.k"])

    source_map = run(weights, w, load, include=("layers.4.*", "layers.0.q"))
    assert {m.tensor for m in source_map.mapped} == {"layers.4.q", "layers.4.k", "layers.0.q"}
    assert set(source_map.checkpoint) == {"layers.4.q", "layers.4.k", "layers.0.q"}
    assert list(source_map.parameters) == ["layers.0.qk", "layers.4.qk"]
    assert source_map.unfed == (("layers.0.qk", 3),)


def test_c29_opaque_target_is_kept_whole() -> None:
    weights = {"a": torch.randn(3), "b": torch.randn(3), "c": torch.randn(3)}
    w = {"ab": ones(3), "c": ones(3)}

    def load(t: Weights) -> None:
        w["ab"].copy_(t["a"] * t["b"])
        w["c"].copy_(t["c"])

    source_map = run(weights, w, load, include=("a",))
    assert [target.tensors for target in source_map.opaque] == [("a", "b")]
    assert {m.parameter for m in source_map.mapped} == {"@a", "@b"}
    assert run(weights, w, load, include=("c",)).opaque == ()


def test_c33_loader_that_replaces_the_parameter_object_is_refused() -> None:
    module = torch.nn.Linear(3, 2, bias=False)
    parameters = dict(module.named_parameters())

    def load(t: Weights) -> None:
        module.weight = torch.nn.Parameter(t["weight"].clone())

    before = module.weight
    with pytest.raises(LayoutError, match=r"replaces 1 parameters.*'weight'"):
        run({"weight": torch.randn(2, 3)}, parameters, load, owners=owners_of(module, parameters))
    assert module.weight is before


def test_c34_loader_that_fills_a_stale_copy_is_refused() -> None:
    w = {"p": ones(2, 3)}
    cached = {"p": w["p"].clone()}
    with pytest.raises(CoverageError, match=r"'p' \(6 elements\)"):
        run({"p": torch.randn(2, 3)}, w, lambda t: cached["p"].copy_(t["p"]))


def test_c37_scales_travel_raw_and_a_packed_scale_is_opaque() -> None:
    weights = {"w_scale": torch.rand(4, 2)}
    w = {"raw": ones(4, 2), "packed": torch.ones(4, 2, dtype=torch.int32)}

    def load(t: Weights) -> None:
        w["raw"].copy_(t["w_scale"])
        w["packed"].copy_((t["w_scale"].log2() + 127).to(torch.int32))

    source_map = run(weights, w, load)
    assert [m.parameter for m in source_map.mapped] == ["raw", "@w_scale"]
    assert [target.parameter for target in source_map.opaque] == ["packed"]


def test_c38_scales_left_at_nan_are_counted_whatever_the_loader_says() -> None:
    w = {"w": ones(2, 2), "w_scale": torch.full((2,), torch.nan)}

    def load(t: Weights) -> set[str]:
        w["w"].copy_(t["w"])
        return {"w", "w_scale"}

    with pytest.raises(CoverageError, match=r"'w_scale' \(2 elements\)"):
        run({"w": torch.randn(2, 2), "w_scale": torch.randn(2)}, w, load)


def test_c39_shape_that_changed_after_load_is_named_with_both_shapes() -> None:
    w = {"w": ones(128, 64)}

    def load(t: Weights) -> None:
        if t["w"].shape != w["w"].shape:
            raise ValueError(f"w: {tuple(t['w'].shape)} into {tuple(w['w'].shape)}")
        w["w"].copy_(t["w"])

    with pytest.raises(LayoutError, match=r"\(100, 64\) into \(128, 64\)"):
        run({"w": torch.randn(100, 64)}, w, load)


def test_probe_gives_the_same_map_where_both_work() -> None:
    weights = {"a": torch.randn(4, 6), "b": torch.randn(2, 6)}
    w = {"p": torch.full((7, 6), 2.0)}

    def load(t: Weights) -> None:
        w["p"][:4].copy_(t["a"].view(2, 2, 6).transpose(0, 1).reshape(4, 6))
        w["p"][4:6].copy_(t["b"])

    traced = run(weights, w, load, allow_unfed=("p",))
    probed = run(weights, w, load, allow_unfed=("p",), method="probe")
    assert traced.unfed == probed.unfed == (("p", 6),)
    x, y = {"p": ones(7, 6)}, {"p": ones(7, 6)}
    updated(traced, weights, x)
    updated(probed, weights, y)
    assert torch.equal(bits(x["p"]), bits(y["p"]))


def test_loader_that_stops_reading_is_refused() -> None:
    w = {"a": ones(2), "b": ones(2)}

    def load(pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in pairs:
            w[name].copy_(tensor)
            return

    with pytest.raises(CoverageError, match=r"'b' \(2 elements\)"):
        discover(
            checkpoint=specs_of({"a": ones(2), "b": ones(2)}),
            parameters=w,
            load_weights=load,
            config=Config(),
        )
