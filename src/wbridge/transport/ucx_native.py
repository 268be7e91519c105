"""NativeUcxWorker: a UCX worker that a thread without the GIL drives, and that writes into peers' memory."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from wbridge.device.base import NetworkedGpu
from wbridge.device.runs import Runs
from wbridge.errors import ConfigError, EndpointClosed, NativeUnavailable, PeerLost
from wbridge.native.ucx import worker_type
from wbridge.transport.ucx_transfer import EAGER_NBYTES, FRAME_NBYTES, FRAME_TAG, Kind, Route, Transfer

if TYPE_CHECKING:
    from wbridge.native._ucx import Worker

_PREFERRED: Final = [("TCP_TX_SEG_SIZE", "256k"), ("TCP_RX_SEG_SIZE", "256k"), ("TLS", "^cuda")]
"""For TCP, where UCX's own 8 KiB segments cost most of the speed. Unless `UCX_TLS` names transports for GPUs,
all memory is the host's, and UCX need neither hook the driver nor ask it about each address. What the
environment sets wins."""
USE_GPU: Final = (
    "set UCX_TLS for all workers, with transports for GPUs, such as UCX_TLS=tcp,cuda_copy,cuda_ipc"
)
_FINISHED: Final = 0
_FRAME: Final = 1
_CLOSE_S: Final = 0.2


def memory_kinds(gpu: NetworkedGpu | None) -> list[str]:
    """Return which kinds of memory the UCX of this process reaches with the settings that it has.

    Raises:
        NativeUnavailable: there is no native worker, or UCX does not open.
    """
    core = _open(gpu)
    try:
        return core.kinds
    finally:
        core.close(0.0)


class NativeUcxWorker:
    """Implements `Worker`, and puts.

    Its thread wakes the loop through one descriptor, once for all that has happened meanwhile.
    It enters `gpu` before it opens UCX.

    Raises:
        NativeUnavailable: UCX cannot be opened.
    """

    def __init__(self, on_frame: Callable[[memoryview], None], gpu: NetworkedGpu | None = None) -> None:
        self._core = _open(gpu)
        self._on_frame = on_frame
        self._loop = asyncio.get_running_loop()
        self._transfers: dict[int, Transfer] = {}
        self._on_error: dict[int, Callable[[], None]] = {}
        self._events: deque[tuple[int, int, bytes]] = deque()
        self._closed = False
        self._end = weakref.finalize(self, self._core.close, 0.0)
        self._descriptor = self._core.descriptor
        self._loop.add_reader(self._descriptor, self._handle)
        self.num_wakeups = 0
        """How often the loop was woken."""

    @property
    def address(self) -> bytes:
        return self._core.address

    @property
    def reaches_gpu(self) -> bool:
        """Whether UCX copies to and from memory of GPUs."""
        return "cuda" in self._core.kinds

    def open_route(self, address: bytes, on_error: Callable[[], None] | None) -> Route:
        try:
            number = self._core.connect(address, watched=on_error is not None)
        except RuntimeError as exc:
            raise PeerLost(f"UCX cannot reach the peer: {exc}; check UCX_TLS and UCX_NET_DEVICES") from exc
        if on_error is not None:
            self._on_error[number] = on_error
        return Route(number)

    def send_frame(self, route: Route, frame: bytes, then: Callable[[Transfer], None]) -> None:
        self._check_open()
        self._started(self._core.send_frame(route.ucx, frame), None, then)

    def send(self, route: Route, memory: memoryview, tag: int, then: Callable[[Transfer], None]) -> Transfer:
        self._check_open()
        return self._started(self._core.send(route.ucx, memory, tag), memory, then)

    def receive(self, memory: memoryview, tag: int, then: Callable[[Transfer], None]) -> Transfer:
        self._check_open()
        return self._started(self._core.receive(memory, tag), memory, then)

    def put(
        self,
        route: Route,
        memory: memoryview,
        *,
        remote: int,
        key: int,
        kind: Kind,
        then: Callable[[Transfer], None],
    ) -> Transfer:
        """Write `memory` to the peer's address `remote`. It stops when the bytes are in place there, or this
        side has failed; only the peer's end proves then that nothing more arrives."""
        self._check_open()
        return self._started(self._core.put(route.ucx, memory, remote, key, kind=kind), memory, then)

    def put_runs(
        self, route: Route, runs: Runs, *, remote: int, key: int, then: Callable[[Transfer], None]
    ) -> Transfer:
        """Like `put`, of many places to many places from the peer's address `remote` on."""
        self._check_open()
        return self._started(self._core.put_runs(route.ucx, runs.table, runs.base, remote, key), runs, then)

    def map(self, memory: memoryview, kind: Kind) -> tuple[int, bytes]:
        """Register memory that peers may write; return its number and the key that they need.

        Raises:
            ConfigError: UCX cannot register so much, or nothing of a GPU.
        """
        remedy = "raise the limit of locked memory (ulimit -l), or set a smaller num_slots or slot_nbytes"
        if kind == "cuda":
            remedy = (
                f"{USE_GPU}, see what `wbridge doctor` says of GPUs, or leave those out: then slots are in "
                "page-locked host memory"
            )
        try:
            number = self._core.map(memory, kind=kind)
            return number, self._core.pack(number)
        except RuntimeError as exc:
            raise ConfigError(
                f"UCX cannot register {memory.nbytes} bytes, of kind {kind!r}, for peers to write: {exc}; "
                + remedy
            ) from exc

    def unmap(self, number: int) -> None:
        if not self._closed:
            self._core.unmap(number)

    def unpack(self, route: Route, key: bytes) -> int:
        """Return the number of a peer's key. Raises `PeerLost` if it is none."""
        try:
            return self._core.unpack(route.ucx, key)
        except RuntimeError as exc:
            raise PeerLost(f"UCX cannot write the memory of a peer: {exc}; check UCX_TLS") from exc

    def forget_key(self, key: int) -> None:
        if not self._closed:
            self._core.forget_key(key)

    def drive(self) -> None:
        if not self._closed:
            self._core.settle()
            self._take()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._descriptor)
        self._core.close(_CLOSE_S)
        self._end.detach()
        self._on_error.clear()
        self._take()
        transfers, self._transfers = self._transfers, {}
        for transfer in transfers.values():
            transfer.forsake()

    def _check_open(self) -> None:
        if self._closed:
            raise EndpointClosed("the UCX worker is closed; open a new transport")

    def _started(self, number: int, memory: object, then: Callable[[Transfer], None]) -> Transfer:
        transfer = self._transfers[number] = Transfer(memory, then)
        return transfer

    def _handle(self) -> None:
        self.num_wakeups += 1
        self._take()

    def _take(self) -> None:
        """Report what has happened, in order also when a report leads here again."""
        self._events += self._core.drain()
        while self._events:
            kind, number, data = self._events.popleft()
            if kind == _FINISHED:
                if (transfer := self._transfers.pop(number, None)) is not None:
                    transfer.settle(ConnectionError(data.decode()) if data else None)
            elif kind == _FRAME:
                if not self._closed:
                    self._on_frame(memoryview(data))
            elif (on_error := self._on_error.pop(number, None)) is not None:
                on_error()


def _open(gpu: NetworkedGpu | None) -> Worker:
    try:
        return worker_type()(
            required=[("RNDV_THRESH", EAGER_NBYTES)],
            preferred=_PREFERRED,
            frame_tag=FRAME_TAG,
            frame_nbytes=FRAME_NBYTES,
            entrance=(0, 0) if gpu is None else gpu.entrance,
        )
    except RuntimeError as exc:
        raise NativeUnavailable(
            f"UCX does not open: {exc}; check UCX_TLS and UCX_NET_DEVICES, or set "
            "transport='shared_memory' where all workers share a host"
        ) from exc
