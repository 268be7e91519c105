"""The checksum of slots: over wire bytes."""

from __future__ import annotations

import xxhash


def checksum(data: memoryview) -> int:
    """Return the 64-bit XXH3 of `data`, never 0, without the GIL.

    0 stands for "no checksum" in `Arrived`, so the one value in 2^64 that would be 0 becomes 1.
    """
    return xxhash.xxh3_64_intdigest(data) or 1
