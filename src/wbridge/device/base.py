"""Device, Stream, Event: work that happens later, in order, and how to wait for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, Protocol, TypeAlias, runtime_checkable

import msgspec

from wbridge.device.memory import ExportedMemory

MemoryKind = Literal["device", "pinned"]

PeerMemory: TypeAlias = memoryview | ExportedMemory
"""Memory of a worker on this host: mapped here already, or on a GPU and to be opened by `Device.adopt`."""

HOST: Final = "host"


class Access(msgspec.Struct, frozen=True):
    """Where a worker's device memory lies, and which memory its device can write. Told to the other workers,
    so that slots lie in device memory only where all that write them can."""

    memory: str = HOST
    """`HOST`, or the name of a GPU; empty if nobody else can write there."""
    writes: tuple[str, ...] = (HOST,)


class Event(Protocol):
    """A point in a stream's work. All work submitted before it was recorded has finished when it is done."""

    def is_done(self) -> bool: ...

    async def wait(self) -> None:
        """Return when done. Cancelled: the work goes on. Raises the work's own error if it failed."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until done; for the caller's thread only, never the loop's."""
        ...


class ForeignStream(Protocol):
    """A stream of another library, such as `torch.cuda.Stream`: version of this protocol, and handle."""

    def __cuda_stream__(self) -> tuple[int, int]: ...


@runtime_checkable
class Stream(Protocol):
    """A queue of work that runs in order, later than its submission."""

    @property
    def is_capturing(self) -> bool:
        """What is submitted now is put into a graph instead: no event of it is ever done."""
        ...

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


AnyStream: TypeAlias = Stream | ForeignStream


class Buffer(Protocol):
    """Owned bytes: they live as long as this object."""

    @property
    def nbytes(self) -> int: ...

    @property
    def kind(self) -> MemoryKind: ...

    @property
    def descriptor(self) -> int | None:
        """Of shared memory: what lets others in, a memfd if `is_host`; open as long as this lives."""
        ...

    @property
    def is_host(self) -> bool:
        """Whether the host can read and write it."""
        ...

    @property
    def view(self) -> memoryview:
        """Writable bytes of host memory. Raises `NativeUnavailable` for memory of a GPU."""
        ...

    @property
    def addresses(self) -> memoryview:
        """`view`, to be sliced and compared. Of a GPU's memory the host must never read or write it."""
        ...

    @property
    def tensor(self) -> object:
        """The same bytes as a 1-d `torch.uint8` tensor (typed `object`: torch stays out of this layer)."""
        ...

    @property
    def device_tensor(self) -> object:
        """The same for copies that the device itself is to do: also of page-locked memory, on the GPU."""
        ...


class NetworkedGpu(Protocol):
    """What a transport needs of a GPU whose memory a network reads and writes."""

    @property
    def entrance(self) -> tuple[int, int]:
        """The address of a C function and its argument: a thread that has called it may work with the GPU.
        The function returns 0, or why it failed."""
        ...

    def settle(self) -> None:
        """Let work that is submitted from now on see what network cards have written by now.

        Raises:
            DeviceFailed: the GPU answers no more.
        """
        ...


class Device(Protocol):
    """Where a worker's parameters live."""

    @property
    def name(self) -> str: ...

    def allocate(self, nbytes: int, kind: MemoryKind, *, shared: bool = False) -> Buffer:
        """Return zeroed memory. `shared`: other processes can be let into it."""
        ...

    def adopt(self, memory: PeerMemory) -> Buffer:
        """Return memory of somebody else as a buffer, which keeps it alive.

        Raises:
            NativeUnavailable: it is on a GPU that this device does not reach.
        """
        ...

    def open_stream(self, name: str, *, background: bool = False, on_host: bool = False) -> Stream:
        """Return a stream of its own. `background`: nobody waits for its work, which gives way. `on_host`:
        its work copies inside the host's memory, and no other stream's event is awaited in it."""
        ...

    def current_stream(self) -> Stream:
        """The calling thread's own stream: the one its framework submits to."""
        ...

    def wrap_stream(self, stream: ForeignStream) -> Stream:
        """Return a stream of another library as one of ours. It stays its owner's.

        Raises:
            ConfigError: it orders nothing on this device.
        """
        ...

    def close(self) -> None:
        """Finish and end all streams."""
        ...
