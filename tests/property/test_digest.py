"""Digests: equal for any two layouts of equal data, different for any other data."""

from __future__ import annotations

import itertools

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.property.layout_strategies import SIZES, elements, regions
from tests.unit.device.grid import COMPILER, grid_digest
from wbridge.device import digest
from wbridge.device.digest import Digester, Part, digested
from wbridge.device.kernels import digests
from wbridge.device.kernels.digests import can_digest
from wbridge.errors import LayoutError
from wbridge.layout.coordinates import Coordinates
from wbridge.layout.region import Region, Strided
from wbridge.layout.source_map import Mapped, ParameterSpec, SourceMap, TensorSpec

DTYPES = st.sampled_from(["float32", "bfloat16", "float16", "int8", "float64", "bool", "float8_e4m3fn"])
NARROW = st.sampled_from(["bfloat16", "float16", "float8_e5m2"])


def held(region: Region, checkpoint: torch.Tensor) -> torch.Tensor:
    """A parameter that holds the region, with other bytes wherever it does not."""
    pairs = list(elements(region.extents, region.source, region.target))
    first = min(0, *(target for _, target in pairs))
    memory = torch.full((max(target for _, target in pairs) - first + 3,), 77).to(checkpoint.dtype)
    memory[[target - first for _, target in pairs]] = checkpoint[[source for source, _ in pairs]]
    return memory[-first:] if first else memory


def total(tensor: torch.Tensor, region: Region, name: str = "w", dtype: str = "") -> int:
    dtype = dtype or str(tensor.dtype).removeprefix("torch.")
    digester = Digester(
        [Part("", name, "p", region.extents, region.target, region.source, dtype)], {"p": tensor}
    )
    digester.run()
    return digester.sums()[""][name]


def flat(num_elements: int) -> Region:
    return Region((num_elements,), Strided(0, (1,)), Strided(0, (1,)))


def data(num_elements: int, seed: int, dtype: str) -> torch.Tensor:
    values = torch.randn(num_elements, generator=torch.Generator().manual_seed(seed)) * 9
    return values.to(getattr(torch, dtype))


@given(drawn=st.data(), dtype=DTYPES)
def test_the_division_into_layouts_does_not_matter(drawn: st.DataObject, dtype: str) -> None:
    """Both layouts are of the same elements: the second is a permutation and another padding of the first."""
    num_elements = drawn.draw(SIZES)
    region = drawn.draw(regions(num_elements, ("slice", "split", "permute", "merge", "select", "flip")))
    checkpoint = data(num_elements, 1, dtype)
    order = drawn.draw(st.permutations(range(len(region.extents))))
    extents = tuple(region.extents[k] for k in order)
    other = Region(
        extents,
        Strided(region.source.offset, tuple(region.source.strides[k] for k in order)),
        Strided(5, tuple(torch.empty(extents).stride())),
    )
    assert total(held(region, checkpoint), region) == total(held(other, checkpoint), other)


@given(num_elements=SIZES, cuts=st.sets(st.integers(1, 89)), dtype=DTYPES)
def test_parts_add_up(num_elements: int, cuts: set[int], dtype: str) -> None:
    tensor = data(num_elements, 2, dtype)
    places = [0, *sorted(cut for cut in cuts if cut < num_elements), num_elements]
    parts = [
        Part("k", "w", "p", (stop - start,), Strided(start, (1,)), Strided(start, (1,)), dtype)
        for start, stop in itertools.pairwise(places)
    ]
    digester = Digester(parts[::-1], {"p": tensor})
    digester.run()
    assert digester.sums() == {"k": {"w": total(tensor, flat(num_elements))}}


@given(num_elements=SIZES, seed=st.integers(0, 99), drawn=st.data())
def test_any_flipped_bit_shows(num_elements: int, seed: int, drawn: st.DataObject) -> None:
    tensor = data(num_elements, seed, "float32")
    before = total(tensor, flat(num_elements))
    bits = tensor.view(torch.int32)
    bits[drawn.draw(st.integers(0, num_elements - 1))] ^= 1 << drawn.draw(st.integers(0, 30))
    assert total(tensor, flat(num_elements)) != before


@given(seed=st.integers(0, 99), places=st.lists(st.integers(0, 35), min_size=2, max_size=2, unique=True))
def test_two_elements_that_changed_places_show(seed: int, places: list[int]) -> None:
    tensor = data(36, seed, "float32")
    swapped = tensor.clone()
    swapped[places] = tensor[places[::-1]]
    assert total(swapped, flat(36)) != total(tensor, flat(36))


def test_equal_tensors_of_other_names_differ() -> None:
    tensor = torch.zeros(64)
    assert total(tensor, flat(64), "q.weight") != total(tensor, flat(64), "k.weight")


@given(
    num_elements=SIZES, seed=st.integers(0, 9), wire=st.sampled_from(["bfloat16", "float16", "float8_e5m2"])
)
def test_both_ends_of_a_cast_are_equal(num_elements: int, seed: int, wire: str) -> None:
    """The sender narrows, the receiver widens again: the digest is over what travels. NaN stays NaN."""
    wide = data(num_elements, seed, "float32")
    wide[0] = float("nan")
    narrow = wide.to(getattr(torch, wire))
    widened = narrow.to(torch.float32)
    region = flat(num_elements)
    assert total(wide, region, dtype=wire) == total(narrow, region) == total(widened, region, dtype=wire)


def test_blocks_bound_the_memory_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = data(7 * 11 * 13, 3, "bfloat16")
    region = Region((7, 11, 13), Strided(0, (143, 13, 1)), Strided(0, (1, 7, 77)))
    whole = total(tensor, region)
    monkeypatch.setattr(digest, "BLOCK_ELEMENTS", 5)
    assert total(tensor, region) == whole


@given(drawn=st.data())
def test_coordinates_are_those_of_the_map(drawn: st.DataObject) -> None:
    num_elements = drawn.draw(SIZES)
    region = drawn.draw(regions(num_elements))
    source_map = SourceMap(
        {"w": TensorSpec((num_elements,), "float32")},
        {"p": ParameterSpec((num_elements,), (1,), "float32")},
        (Mapped("p", "w", region),),
    )
    found = Coordinates(source_map).find("p", "w", region.extents, region.target)
    assert list(elements(region.extents, found)) == list(elements(region.extents, region.source))


# The kernel of GPUs, on the CPU --------------------------------------------------------------------------

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="g++ compiles the kernel for the CPU")
WIRES = [
    *[
        (name, name)
        for name in ("float64", "float32", "bfloat16", "float16", "int8", "int64", "bool", "complex64")
    ],
    *[(name, name) for name in ("float8_e5m2", "float8_e4m3fn")],
    *[("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "float16"), ("float16", "bfloat16")],
]


def any_bits(num_elements: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Infinities, subnormal numbers and NaNs of all kinds among them."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    drawn = torch.randint(0, high, (num_elements * dtype.itemsize,), generator=generator).to(torch.uint8)
    if dtype.is_floating_point and num_elements > 3:
        drawn[: dtype.itemsize] = 0xFF
        drawn[2 * dtype.itemsize : 3 * dtype.itemsize] = 0
    return drawn.view(dtype)


def assert_as_by_torch(parts: list[Part], tensors: dict[str, torch.Tensor]) -> None:
    digester = Digester(parts, tensors)
    digester.run()
    places = {key: place for place, key in enumerate(dict.fromkeys((p.key, p.tensor) for p in parts))}
    found = grid_digest([digested(part, tensors, places) for part in parts], len(places))
    assert {key: digester.sums()[key[0]][key[1]] for key in places} == {
        k: found[n] for k, n in places.items()
    }


@needs_compiler
@given(drawn=st.data(), wire=st.sampled_from(WIRES), seed=st.integers(0, 99))
def test_the_kernel_finds_what_torch_finds(drawn: st.DataObject, wire: tuple[str, str], seed: int) -> None:
    """Of any layout, any bits and any number of parts that share sums."""
    num_elements = drawn.draw(SIZES)
    region = drawn.draw(regions(num_elements, ("slice", "split", "permute", "merge", "select", "flip")))
    whole = Part("a", "v", "q", (num_elements,), Strided(0, (1,)), Strided(7, (3,)), wire[1])
    tensor = held(region, any_bits(num_elements, seed, getattr(torch, wire[0])))
    part = Part("a", "w", "p", region.extents, region.target, region.source, wire[1])
    tensors = {"p": tensor, "q": any_bits(num_elements, seed + 1, getattr(torch, wire[0]))}
    assert_as_by_torch([part, whole, msgspec.structs.replace(part, key="b"), part], tensors)


@needs_compiler
@pytest.mark.parametrize("num_elements", [1, 127, 4096, 4097, 100_000])
def test_the_kernel_digests_tensors_of_any_size(num_elements: int) -> None:
    tensors = {"p": any_bits(num_elements, 3, torch.bfloat16)}
    everything = Part("", "w", "p", (num_elements,), Strided(0, (1,)), Strided(0, (1,)), "bfloat16")
    scalar = Part("", "s", "p", (), Strided(0, ()), Strided(0, ()), "bfloat16")
    assert_as_by_torch([everything, scalar], tensors)


@needs_compiler
def test_parts_that_are_too_large_for_the_kernel_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "_MAX_ELEMENTS", 10)
    part = Part("", "w", "p", (7, 11, 2), Strided(3, (22, 1, 11)), Strided(5, (1, 14, 7)), "float32")
    assert_as_by_torch([part], {"p": any_bits(200, 4, torch.float32)})


def test_what_the_kernel_does_not_know_is_left_to_torch() -> None:
    known = {(a, b): can_digest(getattr(torch, a), getattr(torch, b)) for a, b in WIRES}
    assert all(known.values())
    assert not can_digest(torch.float32, torch.float8_e5m2)
    assert not can_digest(torch.float8_e4m3fnuz, torch.float8_e4m3fnuz)
    assert not can_digest(torch.complex128, torch.complex128)


def test_memory_that_was_taken_away_is_not_read() -> None:
    """A kernel that reads it ends the GPU's use for the process."""
    tensor = torch.zeros(8)
    part = Part("", "w", "p", (8,), Strided(0, (1,)), Strided(0, (1,)), "float32")
    digested(part, {"p": tensor}, {("", "w"): 0})
    tensor.untyped_storage().resize_(28)
    with pytest.raises(LayoutError, match="p: its memory was taken away"):
        digested(part, {"p": tensor}, {("", "w"): 0})
