"""Strided copies agree with as_strided and Tensor.to, whatever the layout and dtype."""

from __future__ import annotations

import itertools
import math
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wbridge.device.copy import Block, build_gather, build_scatter, gather, scatter
from wbridge.device.cpu import CallerStream, CpuBuffer, CpuDevice
from wbridge.device.mirror import Mirror
from wbridge.errors import LayoutError
from wbridge.native.extension import why_missing

STREAM = CallerStream()
DTYPES = (
    "bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "int16",
    "float32", "int32", "float64", "int64", "complex64",
)  # fmt: skip
CASTS = (
    ("float32", "bfloat16"), ("bfloat16", "float32"), ("float64", "float16"), ("float32", "float8_e4m3fn"),
    ("float8_e5m2", "bfloat16"), ("int64", "int8"),
)  # fmt: skip


def random_bits(numel: int, dtype: str, seed: int = 0) -> torch.Tensor:
    """Any bit pattern, NaN payloads included; booleans stay 0 and 1."""
    kind = getattr(torch, dtype)
    bits = torch.randint(0, 256, (numel * kind.itemsize,), generator=torch.Generator().manual_seed(seed))
    return (bits % 2 if kind is torch.bool else bits).to(torch.uint8).view(kind)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Extents, non-overlapping strides in any loop order with gaps, and an offset."""
    extents = draw(st.lists(st.integers(1, 4), max_size=4))
    strides, step = [0] * len(extents), 1
    for loop in draw(st.permutations(range(len(extents)))):
        step *= draw(st.integers(1, 2))
        strides[loop] = step
        step *= extents[loop]
    return tuple(extents), tuple(strides), draw(st.integers(0, 3))


def packed(extents: tuple[int, ...], replicated: set[int]) -> tuple[int, ...]:
    strides, step = [0] * len(extents), 1
    for loop in reversed(range(len(extents))):
        if loop not in replicated:
            strides[loop] = step
            step *= extents[loop]
    return tuple(strides)


def storage_size(layout: tuple[tuple[int, ...], tuple[int, ...], int]) -> int:
    extents, strides, offset = layout
    return offset + 1 + sum((n - 1) * s for n, s in zip(extents, strides, strict=True))


@given(source=layouts(), data=st.data(), dtype=st.sampled_from(DTYPES))
def test_gather_and_scatter_equal_as_strided(source, data, dtype) -> None:
    extents, strides, offset = source
    order = data.draw(st.permutations(range(len(extents))))
    target_strides, step = [0] * len(extents), 1
    for loop in order:
        target_strides[loop] = step
        step *= extents[loop]
    replicated = (
        set(data.draw(st.lists(st.sampled_from(range(len(extents))), unique=True))) if extents else set()
    )
    wire, slot_offset = packed(extents, replicated), 8 * data.draw(st.integers(0, 2))
    parameter = random_bits(storage_size(source), dtype)
    target = random_bits(max(step, 1) + 1, dtype, seed=1)
    untouched = target[-1:].clone()
    buffer = CpuBuffer(slot_offset + math.prod(extents) * parameter.itemsize, "pinned")

    block = Block("p", extents, offset, strides, dtype, slot_offset, wire)
    gather(STREAM, build_gather([block], {"p": parameter}), buffer)
    block = Block("q", extents, 0, tuple(target_strides), dtype, slot_offset, wire)
    scatter(STREAM, build_scatter([block], {"q": target}), buffer)

    expected = parameter.view(torch.uint8).view(-1, parameter.itemsize)
    got = target.view(torch.uint8).view(-1, parameter.itemsize)
    for index in itertools.product(*(range(n) for n in extents)):
        first = [0 if loop in replicated else i for loop, i in enumerate(index)]
        at_source = offset + sum(i * s for i, s in zip(first, strides, strict=True))
        at_target = sum(i * s for i, s in zip(index, target_strides, strict=True))
        assert torch.equal(got[at_target], expected[at_source])
    assert same_bits(target[-1:], untouched)


@pytest.mark.parametrize(("source", "target"), CASTS)
def test_casts_equal_tensor_to(source: str, target: str) -> None:
    """The wire carries the narrower dtype: the sender narrows, the receiver widens."""
    parameter = (torch.randn(64, generator=torch.Generator().manual_seed(0)) * 50).to(getattr(torch, source))
    wire = min(source, target, key=lambda dtype: getattr(torch, dtype).itemsize)
    result, buffer = torch.zeros(64, dtype=getattr(torch, target)), CpuBuffer(64 * 8, "pinned")
    gather(STREAM, build_gather([Block("p", (64,), 0, (1,), wire, 0, (1,))], {"p": parameter}), buffer)
    scatter(STREAM, build_scatter([Block("p", (64,), 0, (1,), wire, 0, (1,))], {"p": result}), buffer)
    assert same_bits(result, parameter.to(getattr(torch, target)))


NON_CONTIGUOUS = {
    "transposed": lambda: torch.arange(12.0).reshape(3, 4).t(),
    "column slice": lambda: torch.arange(24.0).reshape(4, 6)[:, 1:4],
    "stepped": lambda: torch.arange(24.0)[::3],
    "permuted": lambda: torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
    "expanded": lambda: torch.arange(3.0).reshape(3, 1).expand(3, 5),
    "scalar": lambda: torch.tensor(5.0),
}


@pytest.mark.parametrize("make", NON_CONTIGUOUS.values(), ids=NON_CONTIGUOUS.keys())
def test_c24_non_contiguous_tensors_are_copied_element_by_element(make) -> None:
    source, shape = make(), tuple(make().shape)
    wire = packed(shape, set())
    buffer = CpuBuffer(max(source.numel() * 4, 4), "pinned")
    gather(
        STREAM,
        build_gather([Block("p", shape, 0, source.stride(), "float32", 0, wire)], {"p": source}),
        buffer,
    )
    assert torch.equal(buffer.tensor.view(torch.float32).reshape(shape), source)
    if 0 in source.stride():
        return  # an expanded tensor has no memory of its own to write to
    target = make().zero_()
    scatter(
        STREAM,
        build_scatter([Block("p", shape, 0, target.stride(), "float32", 0, wire)], {"p": target}),
        buffer,
    )
    assert torch.equal(target, make())


@pytest.mark.parametrize("inference", [True, False])
def test_parameters_are_written_without_autograd(inference: bool) -> None:
    with torch.inference_mode(inference):
        target = torch.nn.Parameter(torch.zeros(4))
    buffer = CpuBuffer(16, "pinned")
    buffer.tensor.view(torch.float32).fill_(3)
    scatter(STREAM, build_scatter([Block("p", (4,), 0, (1,), "float32", 0, (1,))], {"p": target}), buffer)
    assert target.tolist() == [3.0] * 4
    assert target.grad_fn is None
    gather(STREAM, build_gather([Block("p", (4,), 0, (1,), "float32", 0, (1,))], {"p": target}), buffer)


def test_a_parameter_that_is_a_view_starts_at_its_own_first_element() -> None:
    whole = torch.arange(10.0)
    buffer = CpuBuffer(16, "pinned")
    block = Block("p", (2,), 1, (1,), "float32", 0, (1,))
    gather(STREAM, build_gather([block], {"p": whole[4:8]}), buffer, base=8)
    assert buffer.tensor.view(torch.float32).tolist() == [0.0, 0.0, 5.0, 6.0]


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (Block("q", (2,), 0, (1,), "float32", 0, (1,)), "'q'"),
        (Block("p", (5,), 0, (1,), "float32", 0, (1,)), "p: elements 0 to 4 leave its shape"),
        (Block("p", (2,), -1, (1,), "float32", 0, (1,)), "p: .*describe"),
        (Block("p", (2,), 1, (-1,), "float32", 0, (1,)), "p: .*describe"),
    ],
)
def test_a_block_that_does_not_fit_its_parameter_is_named(block: Block, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        build_gather([block], {"p": torch.arange(8.0)[2:6]})


@pytest.mark.parametrize(
    ("slot_offset", "message"), [(2, "no place for 4-byte"), (8, "lies beyond its slot")]
)
def test_a_block_that_does_not_fit_its_slot_is_named(slot_offset: int, message: str) -> None:
    copies = build_gather([Block("p", (4,), 0, (1,), "float32", slot_offset, (1,))], {"p": torch.zeros(4)})
    with pytest.raises(LayoutError, match=f"p: .*{message}"):
        copies.run(CpuBuffer(16, "pinned"), 0)


@pytest.mark.skipif(why_missing() is not None, reason=str(why_missing()))
def test_what_python_does_for_a_copy_does_not_grow_with_its_tensors() -> None:
    def num_calls(num_tensors: int) -> int:
        tensors = {f"p{k}": torch.ones(4) for k in range(num_tensors)}
        blocks = [Block(f"p{k}", (4,), 0, (1,), "float32", 16 * k, (1,)) for k in range(num_tensors)]
        copies, buffer, events = build_gather(blocks, tensors), CpuBuffer(16 * num_tensors, "pinned"), []
        copies.run(buffer, 0)  # the first run into a slot checks that all fits
        sys.setprofile(lambda *event: events.append(event))
        try:
            copies.run(buffer, 0)
        finally:
            sys.setprofile(None)
        return len(events)

    assert num_calls(3000) <= num_calls(300) < 100


def test_a_mirror_keeps_values_and_strides_and_does_not_follow_the_original() -> None:
    device = CpuDevice(seed=1)
    tensors = {name: make() for name, make in NON_CONTIGUOUS.items()} | {
        "empty": torch.zeros(0, 3),
        "left out": torch.ones(1),
    }
    mirror = Mirror(device, tensors, tensors.keys() - {"left out"})
    mirror.copy(device.open_stream("snapshot")).synchronize()
    for name, copy in mirror.tensors.items():
        assert torch.equal(copy, tensors[name])
        assert copy.stride() == tensors[name].stride()
        if copy.numel() and name != "expanded":
            tensors[name].fill_(-1)
            assert not torch.equal(copy, tensors[name])
    assert "left out" not in mirror.tensors
    device.close()
