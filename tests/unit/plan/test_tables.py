from __future__ import annotations

import msgspec
import pytest

from tests.unit.plan.world import MapBuilder, execute, expected, plan_of, rollout, trainer
from wbridge.errors import LayoutError
from wbridge.layout.source_map import SourceMap
from wbridge.plan.tables import NO_LAYER, Column, MapTable, name_of, names_of, stem_of, tabulate


def stage(layers: range, *, first: int = 0) -> SourceMap:
    """Layers of a pipeline stage, whose own parameters count from `first`."""
    builder = MapBuilder()
    for layer in layers:
        for kind in ("a", "b"):
            builder.whole(f"layers.{layer}.{kind}", (4,), parameter=f"blocks.{layer - first}.{kind}")
    return builder.build()


def places(table: MapTable) -> set[tuple[str, str, int]]:
    return {
        (tensor, *place)
        for row in table.rows
        for tensor, place in zip(
            names_of(row.column.stems, row.column.layers),
            row.column.places(row.column.stems, row.column.layers),
            strict=True,
        )
    }


def test_equal_layers_take_one_row_and_lose_nothing() -> None:
    described = stage(range(8, 16), first=8)
    table = tabulate(described)
    (row,) = table.rows
    assert (row.column.layers, row.column.shift, len(row.column.stems)) == (tuple(range(8, 16)), -8, 2)
    assert places(table) == {(m.tensor, m.parameter, m.region.target.offset) for m in described.mapped}


def test_names_without_a_number_and_fused_parameters_are_ordinary() -> None:
    builder = MapBuilder().whole("embed", (4,)).whole("norm", (4,))
    for expert in range(3):
        builder.whole(f"experts.{expert}.up", (4,), parameter="fused")
    described = builder.build()
    assert places(tabulate(described)) == {
        (m.tensor, m.parameter, m.region.target.offset) for m in described.mapped
    }


def test_stems_take_the_first_whole_number() -> None:
    assert stem_of("model.layers.12.experts.3.w") == ("model.layers.0.experts.3.w", 12)
    assert stem_of("3") == ("0", 3)
    for name in ("h2.w", "layers.007.w", "layers.-1.w", "w"):
        assert stem_of(name) == (name, -1)
        assert name_of(*stem_of(name)) == name
    assert name_of(*stem_of("a.0.b.1")) == "a.0.b.1"


@pytest.mark.parametrize(
    ("tensor", "parameter"),
    [
        ("a.<layer>.3", "a.<layer>.3"),
        ("a.<layer>", "a.5"),
        ("a.3.w", "x.<layer>"),
        ("a.007.3.w", "x.0"),
        ("w", "x.4"),
        ("a.0", "0.0"),
        (f"a.{2**64}.w", f"x.{10**30}"),
        (f"a.{'9' * 5000}.3", "x"),
    ],
)
def test_any_names_are_told_apart_and_fit_the_wire(tensor: str, parameter: str) -> None:
    described = MapBuilder().whole(tensor, (4,), parameter=parameter).whole("a.11.w", (4,)).build()
    maps = {trainer(0, 1): described, rollout(0, 1): described}
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(tabulate(described)), type=MapTable)
    assert places(sent) == {(tensor, parameter, 0), ("a.11.w", "a.11.w", 0)}
    assert execute(plan_of(maps), maps) == expected(maps)


def test_a_plan_does_not_grow_with_equal_layers() -> None:
    def cells(num_layers: int) -> list[object]:
        maps = {trainer(r, 2): stage(range(num_layers)) for r in range(2)}
        maps[rollout(0, 1)] = stage(range(num_layers))
        plan = plan_of(maps)
        return [len(plan.classes), sum(len(c.cells) for c in plan.classes), len(plan.tables[0].rows)]

    assert cells(2) == cells(40) == [1, 1, 1]


def test_a_layer_that_one_worker_lacks_is_a_class_of_its_own() -> None:
    maps = {trainer(0, 2): stage(range(6)), trainer(1, 2): stage(range(4)), rollout(0, 1): stage(range(6))}
    plan = plan_of(maps)
    assert [(c.layers, len(c.cells[0].owners)) for c in plan.classes] == [((0, 1, 2, 3), 2), ((4, 5), 1)]


def test_a_column_without_a_parameter_for_each_tensor_is_refused() -> None:
    with pytest.raises(LayoutError, match="2 tensors with 1 parameters and 1 offsets"):
        msgspec.msgpack.decode(msgspec.msgpack.encode((("v", "w"), ("v",), (0,), (NO_LAYER,))), type=Column)
