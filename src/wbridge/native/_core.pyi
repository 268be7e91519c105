"""Strided copies between parameters and slots, outside the GIL."""

from collections.abc import Mapping, Sequence

from typing_extensions import Buffer

INTERFACE: int = 3

def num_threads() -> int:
    """Return how many threads one copy may use, the calling one included."""

def set_num_threads(num_threads: int) -> None:
    """Bound the threads of every later copy of this process."""

def ring_address() -> int:
    """Return where a C function lies that takes an eventfd as its only argument, a pointer, and adds 1."""

class Table:
    """Copies of one direction, compiled once and run for every version."""

    def __init__(self, rows: Buffer, *, into_slot: bool) -> None: ...
    def run(self, slot: Buffer, base: int) -> None:
        """Copy to or from `slot` at byte `base`, without the GIL."""

    @property
    def nbytes(self) -> int:
        """Bytes that one run writes."""

    @property
    def num_pieces(self) -> int:
        """Parts that the copies were cut into."""

class Places:
    """Where the tensors of a mapping were when this was built."""

    def __init__(self, tensor_type: type, names: tuple[str, ...], tensors: Sequence[object]) -> None: ...
    def moved(self, parameters: Mapping[str, object], begin: int, end: int) -> list[str]:
        """
        Return the names, from number `begin` to `end`, whose tensors lie elsewhere or cannot be looked at.
        """
