"""Counters: what really was sent, measured where it is sent."""

from __future__ import annotations


class Counters:
    """Counts finished puts and messages. Belongs to one loop."""

    def __init__(self) -> None:
        self.puts: int = 0
        self.put_nbytes: int = 0
        self.messages: int = 0
        self.one_sided_nbytes: int = 0

    def add_put(self, nbytes: int) -> None:
        self.puts += 1
        self.put_nbytes += nbytes

    def add_message(self) -> None:
        self.messages += 1

    def add_one_sided(self, nbytes: int) -> None:
        """Of `put_nbytes`, what UCX wrote into the peer's memory without the peer's Python."""
        self.one_sided_nbytes += nbytes

    def as_dict(self) -> dict[str, int]:
        return dict(vars(self))
