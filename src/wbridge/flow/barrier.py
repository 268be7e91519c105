"""Barrier: the set of arrivals still missing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

Key = TypeVar("Key")


class Barrier(Generic[Key]):
    """A set, not a counter: a second arrival of one key changes nothing."""

    def __init__(self, missing: Iterable[Key]) -> None:
        self.missing: set[Key] = set(missing)

    def arrive(self, key: Key) -> bool:
        """Return whether this arrival was awaited."""
        if key not in self.missing:
            return False
        self.missing.remove(key)
        return True

    @property
    def complete(self) -> bool:
        return not self.missing
