"""A chain of casts is one cast exactly when torch says so for every value."""

from __future__ import annotations

import itertools

import pytest
import torch

from wbridge.discovery.casts import is_lossless, is_one_cast
from wbridge.discovery.specs import torch_dtype

FLOATS = ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64")


def all_values(dtype: str) -> torch.Tensor:
    """Every value of a small dtype; powers of two with neighbours of a large one."""
    kind = torch_dtype(dtype)
    if kind.itemsize == 1:
        values = torch.arange(256, dtype=torch.uint8).view(kind)
    elif kind.itemsize == 2:
        values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(kind)
    else:
        torch.manual_seed(0)
        exponents = torch.arange(-140, 120, dtype=torch.float64)
        values = ((1 + torch.rand(200, 1, dtype=torch.float64)) * 2**exponents).flatten().to(kind)
    finite = values.to(torch.float64).isfinite()
    return values[finite]


@pytest.mark.parametrize(("source", "target"), list(itertools.product(FLOATS, FLOATS)))
def test_lossless_means_that_every_value_survives(source: str, target: str) -> None:
    values = all_values(source)
    back = values.to(torch_dtype(target)).to(torch_dtype(source))
    assert is_lossless(source, target) == torch.equal(back.double(), values.double())


@pytest.mark.parametrize(
    ("source", "casts", "target", "same"),
    [
        ("float32", ("bfloat16",), "bfloat16", True),
        ("bfloat16", ("float32",), "bfloat16", True),
        ("float32", ("bfloat16",), "float32", False),
        ("float32", ("float16",), "bfloat16", False),
        ("float32", ("float64", "bfloat16", "float32"), "bfloat16", True),
        ("int64", ("int32",), "int64", False),
        ("uint8", ("int16", "float32"), "float64", True),
        ("int8", ("uint8",), "int8", False),
        ("complex64", (), "complex64", True),
    ],
)
def test_chain_equals_one_cast(source: str, casts: tuple[str, ...], target: str, same: bool) -> None:
    assert is_one_cast(source, casts, target) == same
