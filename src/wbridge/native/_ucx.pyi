"""A UCX worker with one-sided puts, progressed outside the GIL."""

from collections.abc import Sequence

from typing_extensions import Buffer

INTERFACE: int = 3

FINISHED: int = 0

FRAME: int = 1

LOST: int = 2

class Worker:
    """Memory that a running operation uses is the caller's to keep."""

    def __init__(
        self,
        *,
        required: Sequence[tuple[str, str]],
        preferred: Sequence[tuple[str, str]],
        frame_tag: int,
        frame_nbytes: int,
        entrance: tuple[int, int] = (0, 0),
    ) -> None:
        """
        `entrance`: the address of a C function and its argument, for the thread to call first.
        """

    @property
    def address(self) -> bytes: ...
    @property
    def descriptor(self) -> int:
        """An eventfd, readable while `drain` has something."""

    @property
    def kinds(self) -> list[str]:
        """Names of the kinds of memory that UCX handles here."""

    @property
    def num_wakeups(self) -> int:
        """How often the thread has woken up."""

    def connect(self, address: bytes, *, watched: bool) -> int:
        """Return the number of a route."""

    def map(self, memory: Buffer, *, kind: str) -> int:
        """
        Let peers write `memory`, the addresses of memory of that kind; return the number of a region.
        """

    def unmap(self, region: int) -> None: ...
    def pack(self, region: int) -> bytes:
        """Return the key that a peer needs to write the region."""

    def unpack(self, route: int, key: bytes) -> int:
        """Return the number of a key for puts on this route."""

    def forget_key(self, key: int) -> None: ...
    def settle(self) -> None:
        """Handle all that a dead peer of this host has sent."""

    def send_frame(self, route: int, frame: bytes) -> int: ...
    def send(self, route: int, memory: Buffer, tag: int) -> int: ...
    def receive(self, memory: Buffer, tag: int) -> int: ...
    def put(self, route: int, memory: Buffer, remote: int, key: int, *, kind: str) -> int:
        """
        Write `memory`, of that kind, to the peer's address `remote`; over when the bytes are in place there.
        """

    def put_runs(self, route: int, runs: Buffer, base: int, remote: int, key: int) -> int:
        """
        Write all runs, rows of (from, to, nbytes), from `base` to the peer's address `remote`, as one put.
        """

    def drain(self) -> list[tuple[int, int, bytes]]:
        """
        Return what has happened: kind, number, and the frame or the reason of a failure.
        """

    def close(self, timeout_s: float) -> None:
        """End the thread. Idempotent."""
