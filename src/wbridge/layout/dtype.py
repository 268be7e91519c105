"""Element types by name, without torch."""

from __future__ import annotations

from wbridge.errors import LayoutError

ITEMSIZE: dict[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "uint16": 2, "int16": 2, "float16": 2, "bfloat16": 2,
    "uint32": 4, "int32": 4, "float32": 4,
    "uint64": 8, "int64": 8, "float64": 8, "complex64": 8,
}  # fmt: skip
"""Bytes of one element, by torch's dtype name without `torch.`."""


def itemsize(dtype: str) -> int:
    """Return the bytes of one element.

    Raises:
        LayoutError: no such dtype, or one whose elements are smaller than a byte.
    """
    try:
        return ITEMSIZE[dtype]
    except KeyError:
        known = ", ".join(sorted(ITEMSIZE))
        raise LayoutError(f"dtype {dtype!r} is not supported; use one of {known}") from None


def wire_dtype(source: str, target: str) -> str:
    """Return the narrower of the two: the sender casts when narrowing, the receiver when widening.

    Of two that are equally wide it is the target's, so that both ends have what `verify()` compares.
    """
    return source if itemsize(source) < itemsize(target) else target
