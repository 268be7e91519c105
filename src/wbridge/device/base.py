"""Device, Stream, Event: work that happens later, in order, and how to wait for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

MemoryKind = Literal["device", "pinned"]


class Event(Protocol):
    """A point in a stream's work. All work submitted before it was recorded has finished when it is done."""

    def is_done(self) -> bool: ...

    async def wait(self) -> None:
        """Return when done. Cancelled: the work goes on. Raises the work's own error if it failed."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until done; for the caller's thread only, never the loop's."""
        ...


class Stream(Protocol):
    """A queue of work that runs in order, later than its submission."""

    def submit(self, work: Callable[[], None]) -> None:
        """Append `work`. It must not block on anything but memory."""
        ...

    def record(self) -> Event:
        """Mark the point after all work submitted so far."""
        ...

    def wait_event(self, event: Event) -> None:
        """Make all work submitted from now on wait for `event`, which may belong to another stream."""
        ...

    def close(self) -> None:
        """Accept no more work; what was submitted still runs, and nothing here waits for it. Idempotent."""
        ...


class Buffer(Protocol):
    """Owned bytes: they live as long as this object."""

    @property
    def nbytes(self) -> int: ...

    @property
    def kind(self) -> MemoryKind: ...

    @property
    def descriptor(self) -> int | None:
        """Of shared memory: the memfd that another process may map. Open as long as this object lives."""
        ...

    @property
    def view(self) -> memoryview:
        """Writable bytes for the transport (host-visible memory)."""
        ...

    @property
    def tensor(self) -> object:
        """The same bytes as a 1-d `torch.uint8` tensor (typed `object`: torch stays out of this layer)."""
        ...


class Device(Protocol):
    """Where a worker's parameters live."""

    @property
    def name(self) -> str: ...

    def allocate(self, nbytes: int, kind: MemoryKind, *, shared: bool = False) -> Buffer:
        """Return zeroed memory. `shared`: other processes can be let into it, if it is host memory."""
        ...

    def adopt(self, memory: memoryview) -> Buffer:
        """Return host memory of somebody else as a buffer, which keeps it alive."""
        ...

    def open_stream(self, name: str, *, background: bool = False) -> Stream:
        """Return a stream of its own. `background`: nobody waits for its work, which gives way."""
        ...

    def current_stream(self) -> Stream:
        """The calling thread's own stream: the one its framework submits to."""
        ...

    def close(self) -> None:
        """Finish and end all streams."""
        ...
