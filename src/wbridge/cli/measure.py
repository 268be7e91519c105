"""Measures what `wbridge advise` computes with: copies on this machine, and a link to another one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import anyio
import anyio.lowlevel
import msgspec
from anyio.abc import ObjectReceiveStream

from wbridge.config import Config
from wbridge.device.base import Buffer, Device, Event, MemoryKind
from wbridge.device.copy import Block, Tensors, build_gather, build_scatter, gather, scatter
from wbridge.device.select import open_device
from wbridge.errors import PeerLost, ProtocolError
from wbridge.session.portal import Loop, LoopThread
from wbridge.staging.checksum import checksum
from wbridge.transport.base import Endpoint, Message, RemoteSlot
from wbridge.transport.host import process_token
from wbridge.transport.select import Transports, open_transports

RUN_NBYTES: Final = 4096
"""Copies are of columns: runs of this many bytes, as many left out between them."""

_REPEATS: Final = 5
_SLOT_NBYTES: Final = 8 * 2**20
_NUM_SLOTS: Final = 2
_NUM_ECHOES: Final = 50
_HELLO, _ECHO, _LANDED, _CREDIT, _BYE = (bytes([kind]) for kind in range(5))


class CopySpeeds(msgspec.Struct, frozen=True):
    """One worker's share while all copy at once; the names are those of `Speeds`."""

    snapshot_gb_s: float
    apply_gb_s: float
    device_gb_s: float
    host_gb_s: float
    checksum_gb_s: float
    change_s: float


class LinkSpeed(msgspec.Struct, frozen=True):
    """What one sender gets through an idle link; the names are those of `Speeds`."""

    link_gb_s: float
    round_s: float


def measure_copies(device_type: str, *, nbytes: int, num_workers: int) -> CopySpeeds:
    """Copy `nbytes` in each of `num_workers` streams, with the copies that updates are made of.

    Raises:
        NativeUnavailable: the device's software is not installed.
    """
    device = open_device(device_type)
    try:
        workers = [_Worker(device, f"worker {k}", nbytes) for k in range(num_workers)]
        return CopySpeeds(
            snapshot_gb_s=_speed(workers, _Worker.snapshot),
            apply_gb_s=_speed(workers, _Worker.apply),
            device_gb_s=_speed(workers, _Worker.gather_on_device),
            host_gb_s=_speed(workers, _Worker.gather_on_host),
            checksum_gb_s=_checksum_speed([worker.host.view for worker in workers]),
            change_s=_change_s(),
        )
    finally:
        device.close()


class _Worker:
    """One stream, with parameters and a slot on either side of it."""

    def __init__(self, device: Device, name: str, nbytes: int) -> None:
        self.nbytes = -(-nbytes // RUN_NBYTES) * RUN_NBYTES
        self._stream = device.open_stream(name)
        self.host = device.allocate(self.nbytes, "pinned")
        self._device_slot = device.allocate(self.nbytes, "device")
        columns, rows = self._block(2 * RUN_NBYTES), self._block(RUN_NBYTES)
        live, copied = self._parameters(device, "device"), self._parameters(device, "pinned")
        self._snapshot = build_gather([rows], live)
        self._gather = build_gather([columns], live)
        self._gather_copied = build_gather([columns], copied)
        self._scatter = build_scatter([columns], live)

    def _parameters(self, device: Device, kind: MemoryKind) -> Tensors:
        parameters: Tensors = {"w": device.allocate(2 * self.nbytes, kind).tensor}  # type: ignore[dict-item]  # torch stays below
        return parameters

    def _block(self, stride: int) -> Block:
        return Block(
            "w", (self.nbytes // RUN_NBYTES, RUN_NBYTES), 0, (stride, 1), "uint8", 0, (RUN_NBYTES, 1)
        )

    def snapshot(self) -> Event:
        return gather(self._stream, self._snapshot, self.host)

    def apply(self) -> Event:
        return scatter(self._stream, self._scatter, self.host)

    def gather_on_device(self) -> Event:
        return gather(self._stream, self._gather, self._device_slot)

    def gather_on_host(self) -> Event:
        return gather(self._stream, self._gather_copied, self.host)


def _speed(workers: list[_Worker], copy: Callable[[_Worker], Event]) -> float:
    def copy_all() -> None:
        for event in [copy(worker) for worker in workers]:
            event.synchronize()

    return workers[0].nbytes / _median_s(copy_all) / 1e9


def _checksum_speed(views: list[memoryview]) -> float:
    with ThreadPoolExecutor(len(views)) as threads:
        return views[0].nbytes / _median_s(lambda: list(threads.map(checksum, views))) / 1e9


def _change_s() -> float:
    loop = LoopThread("wbridge measures its threads")
    loop.start()
    try:
        return statistics.median(time_change(loop) for _ in range(_NUM_ECHOES))
    finally:
        loop.stop(wait=True)


def time_change(loop: Loop) -> float:
    """Half of what it takes to call something in the thread of `loop` and to get its result."""
    begin_s = time.perf_counter()
    loop.submit(anyio.lowlevel.checkpoint).finished.result()
    return (time.perf_counter() - begin_s) / 2


def _median_s(work: Callable[[], object]) -> float:
    """The median time after one call that warms up."""
    times_s = []
    for _ in range(_REPEATS + 1):
        begin_s = time.perf_counter()
        work()
        times_s.append(time.perf_counter() - begin_s)
    return statistics.median(times_s[1:])


async def serve_link(config: Config, announce: Callable[[str], None]) -> None:
    """Be the far end of one `measure_link`. `announce` gets the address to measure to."""
    async with open_transports(config, process_token(), name="far end") as transport:
        announce(transport.address.hex())
        await _Far(transport).serve()


class _Far:
    """Gives credits for its slots, one after the other, and answers echoes."""

    def __init__(self, transport: Transports) -> None:
        self._transport = transport
        self._slots: list[Buffer] = []

    async def serve(self) -> None:
        endpoint: Endpoint | None = None
        device = open_device("cpu")
        try:
            async for message in self._transport.inbox:
                kind, content = message.payload[:1], message.payload[1:]
                if kind == _HELLO:
                    endpoint = await self._transport.connect(content, message.peer)
                    self._open_slots(device)
                    for index in range(_NUM_SLOTS):
                        await self._credit(endpoint, index)
                elif kind == _BYE or endpoint is None:
                    return
                elif kind == _LANDED:
                    await self._credit(endpoint, content[0])
                else:
                    await endpoint.send(message.payload)
        except PeerLost:
            return  # the near end has what it wanted, or says itself what went wrong
        finally:
            for slot in self._slots:
                self._transport.unregister(slot)
            device.close()

    def _open_slots(self, device: Device) -> None:
        self._slots = [device.allocate(_SLOT_NBYTES, "pinned", shared=True) for _ in range(_NUM_SLOTS)]
        for slot in self._slots:
            self._transport.register(slot)

    async def _credit(self, endpoint: Endpoint, index: int) -> None:
        remote = self._transport.expose(self._slots[index].view, endpoint.peer)
        await endpoint.send(_CREDIT + bytes([index]) + remote.token)


async def measure_link(config: Config, address: str, *, duration_s: float) -> LinkSpeed:
    """Write to the far end for `duration_s`, by the transport that a job would take.

    Raises:
        PeerLost: nobody answers there.
        ProtocolError: `address` is none.
    """
    try:
        peer = bytes.fromhex(address)
    except ValueError as exc:
        raise ProtocolError("the link's address is not what `wbridge advise --serve-link` prints") from exc
    async with open_transports(config, process_token(), name="near end") as transport:
        with anyio.move_on_after(config.connect_timeout_s):
            endpoint = await transport.connect(peer, "far end")
            await endpoint.send(_HELLO + transport.address)
            return await _Near(transport.inbox, endpoint).measure(duration_s)
    raise PeerLost("nobody answers there; start `wbridge advise --serve-link` on the other host again")


class _Near:
    """Puts whatever has a credit."""

    def __init__(self, inbox: ObjectReceiveStream[Message], endpoint: Endpoint) -> None:
        self._inbox, self._endpoint = inbox, endpoint
        self._source = memoryview(bytearray(_SLOT_NBYTES))
        self._num_put = 0

    async def measure(self, duration_s: float) -> LinkSpeed:
        credits = [await self._receive(_CREDIT) for _ in range(_NUM_SLOTS)]
        rounds_s = [await self._echo() for _ in range(_NUM_ECHOES)]
        begin_s = time.perf_counter()
        async with anyio.create_task_group() as tasks:
            for credit in credits:
                tasks.start_soon(self._put, credit)
            while time.perf_counter() < begin_s + duration_s:
                tasks.start_soon(self._put, await self._receive(_CREDIT))
        took_s = time.perf_counter() - begin_s
        await self._endpoint.send(_BYE)
        await self._endpoint.flush()
        return LinkSpeed(self._num_put * _SLOT_NBYTES / took_s / 1e9, statistics.median(rounds_s))

    async def _put(self, credit: bytes) -> None:
        remote = RemoteSlot(credit[1:], _SLOT_NBYTES)
        await self._endpoint.put(self._source, remote, _LANDED + credit[:1])
        self._num_put += 1

    async def _echo(self) -> float:
        begin_s = time.perf_counter()
        await self._endpoint.send(_ECHO)
        await self._receive(_ECHO)
        return time.perf_counter() - begin_s

    async def _receive(self, kind: bytes) -> bytes:
        message = await self._inbox.receive()
        if message.payload[:1] != kind:
            raise ProtocolError(f"{message.peer} sent what is no part of a measurement; run both ends again")
        return message.payload[1:]
