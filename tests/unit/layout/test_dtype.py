"""Element sizes and the choice of the wire's dtype."""

from __future__ import annotations

import pytest

from wbridge.errors import LayoutError
from wbridge.layout.dtype import itemsize, wire_dtype


def test_sizes_follow_the_name() -> None:
    assert [itemsize(d) for d in ("float8_e4m3fn", "bfloat16", "float32", "int64")] == [1, 2, 4, 8]


def test_the_wire_carries_the_narrower_dtype() -> None:
    assert wire_dtype("float32", "bfloat16") == "bfloat16"
    assert wire_dtype("bfloat16", "float32") == "bfloat16"
    assert wire_dtype("float16", "bfloat16") == "bfloat16"


def test_an_unknown_dtype_lists_the_known_ones() -> None:
    with pytest.raises(LayoutError, match="'int4' is not supported; use one of bfloat16"):
        itemsize("int4")
