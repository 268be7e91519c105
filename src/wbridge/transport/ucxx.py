"""UcxxTransport: the transport between processes, on UCX."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

import anyio
import msgspec

from wbridge.device.base import Buffer, NetworkedGpu
from wbridge.errors import ConfigError, DeviceFailed, EndpointClosed, PeerLost, ProtocolError
from wbridge.native.ucx import why_missing
from wbridge.transport.base import RemoteSlot
from wbridge.transport.counters import Counters
from wbridge.transport.exposures import Exposures
from wbridge.transport.host import check_descriptors, host_identity, process_token
from wbridge.transport.inbox import Inbox
from wbridge.transport.lifeline import Lifeline
from wbridge.transport.ucx_endpoint import SMALL_NBYTES, UcxxEndpoint
from wbridge.transport.ucx_frames import Frame, Hello, ToSender, UcxAddress, decode, encode
from wbridge.transport.ucx_grants import Grant, Grants, Regions, address_of, decode_grant
from wbridge.transport.ucx_incoming import Incoming
from wbridge.transport.ucx_native import USE_GPU, NativeUcxWorker
from wbridge.transport.ucx_transfer import Route, Transfer, Worker
from wbridge.transport.ucx_worker import UcxWorker
from wbridge.transport.ucx_writing import Writing

_CLOSE_TIMEOUT_S: Final = 10.0
_NUM_DESCRIPTORS: Final = 20
"""What a worker of UCX opens at once, and a few for its first peers."""

_logger = logging.getLogger(__name__)


class UcxxTransport:
    """UCX between worker addresses: small things are tagged messages, and bytes of slots one-sided puts.

    Without the extension's native worker, here or at a peer, the bytes come as messages too: then each put
    costs three of them, and bytes move only while this loop runs. Without UCX error handling, which
    would rule out shared memory, a dead process of the same host is noticed through its pidfd.

    Slots may lie in the memory of `gpu` too, if `UCX_TLS` has transports for it, here and at the peer.

    Raises on entering:
        NativeUnavailable: there is neither the native worker nor ucxx, or not the one that `native` demands;
            or UCX does not open.
    """

    def __init__(
        self,
        name: str,
        *,
        host: str = "",
        inbox: Inbox | None = None,
        exposures: Exposures | None = None,
        close_timeout_s: float = _CLOSE_TIMEOUT_S,
        native: bool | None = None,
        gpu: NetworkedGpu | None = None,
    ) -> None:
        self._name = name
        self._gpu = gpu
        self._native = why_missing() is None if native is None else native
        self._host = host_identity(host)
        self._inbox = inbox or Inbox(name)
        self._exposures = exposures or Exposures()
        self._counters = Counters()
        self._close_timeout_s = close_timeout_s
        self._outgoing: dict[int, UcxxEndpoint] = {}
        self._incoming: dict[int, Incoming] = {}
        self._writers: dict[str, Incoming] = {}
        """By name, the newest connection of each peer."""
        self._left: dict[int, Grants] = {}
        """Of lost connections: what they may still write."""
        self._worker: Worker | None = None
        self._regions: Regions | None = None
        self._on_gpus: list[Buffer] = []
        """What was registered that the host must not touch."""
        self._closing = False

    async def __aenter__(self) -> Self:
        check_descriptors(self._name, _NUM_DESCRIPTORS)
        self._lifeline = Lifeline()
        has_gpu = False
        if self._native:
            self._worker = worker = NativeUcxWorker(self._on_frame, self._gpu)
            has_gpu = self._gpu is not None and worker.reaches_gpu
            self._regions = Regions(worker, has_gpu=has_gpu)
        else:
            self._worker = UcxWorker(self._on_frame)
        self._own = UcxAddress(self._worker.address, self._host, process_token(), self._native, has_gpu)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    @property
    def name(self) -> str:
        return self._name

    @property
    def address(self) -> bytes:
        return msgspec.msgpack.encode(self._own)

    @property
    def inbox(self) -> Inbox:
        return self._inbox

    @property
    def counters(self) -> dict[str, int]:
        return self._counters.as_dict()

    async def connect(self, address: bytes, peer: str, counters: Counters | None = None) -> UcxxEndpoint:
        """Open an endpoint; `counters` replaces the transport's own. Cancelled: leaves none.

        Raises:
            PeerLost: the peer is gone, or UCX finds no way to it.
            EndpointClosed: this transport is closed.
        """
        worker, remote = self._open_worker(), _decode_address(address, peer)
        same_host = remote.host == self._host
        route = worker.open_route(remote.worker, None if same_host else lambda: endpoint.lose())
        connection = int.from_bytes(os.urandom(7), "little")
        send = self._sender(route, lambda: endpoint.lose())
        endpoint = UcxxEndpoint(
            connection=connection,
            peer=peer,
            worker=worker,
            route=route,
            writing=Writing(worker, route, send) if isinstance(worker, NativeUcxWorker) else None,
            is_near=same_host and remote.puts,
            has_gpus=self._own.has_gpu and remote.has_gpu,
            send=send,
            counters=counters or self._counters,
            close_timeout_s=self._close_timeout_s,
            forget=lambda: self._forget(endpoint, remote),
        )
        self._outgoing[connection] = endpoint
        try:
            if same_host:
                self._lifeline.watch(remote.process, endpoint.die)
            await endpoint.open(Hello(connection, self._name, self._own))
        except BaseException:
            self._forget(endpoint, remote)
            raise
        return endpoint

    def has_gpu_like(self, address: bytes) -> bool:
        """Whether UCX reaches the memory of GPUs here and at the transport at `address`."""
        return self._own.has_gpu and _decode_address(address, "a peer").has_gpu

    def register(self, buffer: Buffer) -> None:
        """Let writers know the buffer, if there is a native worker that reaches its memory."""
        if not buffer.is_host and not any(buffer is known for known in self._on_gpus):
            self._on_gpus.append(buffer)
        region = self._regions.add(buffer) if self._regions is not None else None
        if region is not None:
            for incoming in self._incoming.values():
                if incoming.hello.address.puts:
                    incoming.show(region)

    def unregister(self, buffer: Buffer) -> None:
        self._on_gpus = [known for known in self._on_gpus if known is not buffer]
        number = self._regions.remove(buffer) if self._regions is not None else None
        if number is not None:
            for incoming in self._incoming.values():
                if incoming.hello.address.puts:
                    incoming.hide(number)

    def expose(self, memory: memoryview, peer: str) -> RemoteSlot:
        """Grant the slot, if `peer` writes into this process's memory; else its bytes come as a message.

        Raises:
            ConfigError: the slot is on a GPU, which UCX does not reach here or at the peer.
        """
        self._open_worker()
        is_on_gpu = self._is_on_gpu(memory)
        if not is_on_gpu and memory.nbytes <= SMALL_NBYTES:
            return self._exposures.expose(memory)
        writer = self._writers.get(peer)
        if is_on_gpu and (reason := self._why_not_on_gpu(writer)) is not None:
            raise ConfigError(
                f"{self._name}: {peer} was to write a slot on a GPU, and {reason}; {USE_GPU}, or leave slots "
                "in host memory"
            )
        if writer is not None and writer.is_open and writer.hello.address.puts and self._regions is not None:
            place = self._regions.locate(memory)
            if place is not None:
                return RemoteSlot(writer.grants.give(place.region, place.offset).encode(), memory.nbytes)
        # Only the writer, which has gone, could write a GPU: the host must receive no message there.
        return self._exposures.withdrawn(memory.nbytes) if is_on_gpu else self._exposures.expose(memory)

    async def withdraw(self, remote: RemoteSlot) -> bool:
        """See `Transport.withdraw`. What was granted comes back when its writer has answered, or has ended;
        False if it is out of reach, or this transport closed before the answer came."""
        grant = decode_grant(remote.token)
        if grant is None:
            return await self._exposures.withdraw(remote)
        incoming = self._incoming.get(grant.connection)
        grants = self._left.get(grant.connection) if incoming is None else incoming.grants
        return grants is None or await grants.withdraw(grant)

    async def aclose(self) -> None:
        """Close all endpoints, tell the peers, and end within the time allowed for closing. Idempotent."""
        worker = self._worker
        if worker is None:
            return
        self._closing = True
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                for endpoint in list(self._outgoing.values()):
                    tasks.start_soon(endpoint.aclose)
        incoming_ones = list(self._incoming.values())
        with anyio.CancelScope(shield=True), anyio.move_on_after(self._close_timeout_s):
            async with anyio.create_task_group() as tasks:
                for incoming in incoming_ones:
                    tasks.start_soon(incoming.grants.withdraw_all)
        for incoming in incoming_ones:
            incoming.close()
        self._inbox.close()
        self._lifeline.close()
        self._worker = None  # what ends now has nobody to tell
        worker.close()
        for incoming in incoming_ones:
            incoming.end()

    def _is_on_gpu(self, memory: memoryview) -> bool:
        if not self._on_gpus or not memory.nbytes:
            return False
        start = address_of(memory)
        return any(0 <= start - address_of(buffer.addresses) < buffer.nbytes for buffer in self._on_gpus)

    def _why_not_on_gpu(self, writer: Incoming | None) -> str | None:
        if not self._own.has_gpu:
            return "UCX reaches no memory of GPUs in this worker"
        if writer is not None and not writer.hello.address.has_gpu:
            return "UCX reaches no memory of GPUs there"
        return None

    def _landed(self, grant: Grant) -> None:
        """A network card may have written the GPU's memory, which work on the GPU need not see yet."""
        if self._gpu is not None and self._regions is not None and self._regions.is_on_gpu(grant.region):
            self._gpu.settle()

    def _open_worker(self) -> Worker:
        if self._worker is None or self._closing:
            raise EndpointClosed(f"{self._name}: the ucxx transport is closed; open a new one")
        return self._worker

    def _on_frame(self, data: memoryview) -> None:
        """Handle one frame; never waits, so that no peer holds up another."""
        try:
            frame = decode(data)
            if isinstance(frame, Hello):
                self._accept(frame)
            elif isinstance(frame, ToSender):
                if (endpoint := self._outgoing.get(frame.connection)) is not None:
                    endpoint.on_frame(frame)
            elif (incoming := self._incoming.get(frame.connection)) is not None:
                incoming.on_frame(frame)
        except (ProtocolError, PeerLost, DeviceFailed) as exc:
            _logger.warning("frame dropped", extra={"transport": self._name, "reason": str(exc)})

    def _accept(self, hello: Hello) -> None:
        """Open the other side of a connection; one that comes while this side closes hears so at once."""
        worker, remote = self._worker, hello.address
        if worker is None:
            return
        same_host = remote.host == self._host
        route = worker.open_route(remote.worker, None if same_host else lambda: incoming.lose())
        incoming = Incoming(
            hello,
            worker=worker,
            send=self._sender(route, lambda: incoming.lose()),
            inbox=self._inbox,
            exposures=self._exposures,
            landed=self._landed,
            forget=lambda: self._drop(incoming),
        )
        if self._closing:
            incoming.close()
            return
        if same_host:
            self._lifeline.watch(remote.process, incoming.die)
        self._incoming[hello.connection] = incoming
        self._writers[hello.name] = incoming
        regions = self._regions if hello.address.puts else None
        if regions is None:
            incoming.welcome([])
            return
        regions.need()
        incoming.welcome(regions)

    def _sender(self, route: Route, on_failure: Callable[[], None]) -> Callable[[Frame], None]:
        def sent(transfer: Transfer) -> None:
            if transfer.error is not None:
                on_failure()

        def send(frame: Frame) -> None:
            if self._worker is not None:
                self._worker.send_frame(route, encode(frame), sent)

        return send

    def _drop(self, incoming: Incoming) -> None:
        self._incoming.pop(incoming.hello.connection, None)
        if self._writers.get(incoming.hello.name) is incoming:
            del self._writers[incoming.hello.name]
        if incoming.grants.num_open:
            self._left[incoming.hello.connection] = incoming.grants
        self._lifeline.unwatch(incoming.hello.address.process, incoming.die)

    def _forget(self, endpoint: UcxxEndpoint, remote: UcxAddress) -> None:
        self._outgoing.pop(endpoint.connection, None)
        self._lifeline.unwatch(remote.process, endpoint.die)


def _decode_address(address: bytes, peer: str) -> UcxAddress:
    try:
        return msgspec.msgpack.decode(address, type=UcxAddress)
    except msgspec.MsgspecError as exc:
        raise ProtocolError(f"the address of {peer} is not one of a ucxx transport: {exc}") from exc
