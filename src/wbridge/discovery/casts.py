"""Whether a chain of casts ends in the same values as one cast, which is all that the wire can do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class _Range(NamedTuple):
    """What a dtype holds: signed integers of `digits` bits times powers of two with `exponent` bits."""

    digits: int
    exponent: int
    signed: bool = True


_RANGES = {
    "bool": _Range(1, 0, signed=False),
    "uint8": _Range(8, 0, signed=False), "uint16": _Range(16, 0, signed=False),
    "uint32": _Range(32, 0, signed=False), "uint64": _Range(64, 0, signed=False),
    "int8": _Range(7, 0), "int16": _Range(15, 0), "int32": _Range(31, 0), "int64": _Range(63, 0),
    "float8_e4m3fn": _Range(4, 4), "float8_e5m2": _Range(3, 5), "float16": _Range(11, 5),
    "bfloat16": _Range(8, 8), "float32": _Range(24, 8), "float64": _Range(53, 11),
}  # fmt: skip


def is_lossless(source: str, target: str) -> bool:
    """Return whether every value of `source` is a value of `target`, bit for bit after a round trip."""
    if source == target:
        return True
    a, b = _RANGES.get(source), _RANGES.get(target)
    if a is None or b is None or a.digits > b.digits or (a.signed and not b.signed):
        return False
    if source == "float8_e4m3fn":  # its range is smaller than 4 exponent bits of an IEEE type suggest
        return b.exponent >= 5
    return a.exponent <= b.exponent


def is_one_cast(source: str, casts: Sequence[str], target: str) -> bool:
    """Return whether casting through `casts` into `target` equals casting `source` to `target` at once."""
    current = source
    for dtype in casts:
        if is_lossless(current, dtype):
            continue
        if dtype != target:
            return False
        current = dtype
    return True
