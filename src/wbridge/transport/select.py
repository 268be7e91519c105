"""Transports: one transport over several, which takes the nearest way to each peer."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Final, Literal, Self, TypeAlias

import msgspec

from wbridge.config import Config
from wbridge.device.base import Access, Buffer, NetworkedGpu
from wbridge.errors import ConfigError, NativeUnavailable, ProtocolError
from wbridge.native.ucx import why_missing
from wbridge.transport.base import Endpoint, RemoteSlot
from wbridge.transport.counters import Counters
from wbridge.transport.exposures import Exposures
from wbridge.transport.host import host_identity
from wbridge.transport.inbox import Inbox
from wbridge.transport.loopback import LoopbackTransport
from wbridge.transport.shared_memory import SharedMemoryTransport
from wbridge.transport.ucx_native import USE_GPU
from wbridge.transport.ucxx import UcxxTransport
from wbridge.transport.unix_frames import is_slot_token

LinkClass: TypeAlias = Literal["process", "host", "network"]
LINK_CLASSES: Final[tuple[LinkClass, ...]] = ("process", "host", "network")


class _Address(msgspec.Struct, frozen=True):
    """Where a worker can be reached. A transport that it does not use is empty, so that both directions of a
    pair take the same one."""

    process: str
    host: str
    loopback: bytes
    shared_memory: bytes
    ucxx: bytes
    access: Access


def open_transports(
    config: Config,
    process_token: str,
    *,
    name: str,
    access: Access | None = None,
    gpu: NetworkedGpu | None = None,
) -> Transports:
    """Choose by `config.transport`; to be entered as an async context manager.

    `process_token` is equal for adapters of one process, and only for them. `name` is the worker's:
    the peer of the messages that it sends. `access` is its device's; by default the host's. `gpu` is that
    device, if a network reads and writes its memory.
    """
    return Transports(config, process_token, name=name, access=access, gpu=gpu)


class Transports:
    """Loopback inside the process, shared memory inside the host, ucxx to all others; with one inbox.

    Raises on entering:
        NativeUnavailable: `config.transport` asks for ucxx, which is not installed, or UCX does not open.
    """

    def __init__(
        self,
        config: Config,
        process_token: str,
        *,
        name: str,
        access: Access | None = None,
        gpu: NetworkedGpu | None = None,
    ) -> None:
        self._config = config
        self._access = access or Access()
        self._process = process_token
        self._name = name
        self._host = host_identity(config.host)
        self._inbox = Inbox(name)
        self._exposures = Exposures()
        self._counters: dict[LinkClass, Counters] = {link: Counters() for link in LINK_CLASSES}
        self._loopback = LoopbackTransport(name, inbox=self._inbox, exposures=self._exposures)
        self._takes_loopback = config.transport in ("auto", "loopback")
        self._shared_memory: SharedMemoryTransport | None = None
        if config.transport in ("auto", "shared_memory"):
            self._shared_memory = SharedMemoryTransport(name, inbox=self._inbox)
        self._mapped: set[str] = set()
        """Peers that write through shared memory."""
        self._ucxx: UcxxTransport | None = None
        if config.transport == "ucxx" or (config.transport == "auto" and _has_ucxx()):
            self._ucxx = UcxxTransport(
                name,
                host=self._host,
                inbox=self._inbox,
                exposures=self._exposures,
                close_timeout_s=config.close_timeout_s,
                gpu=gpu,
            )
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as opening:
            await opening.enter_async_context(self._loopback)
            if self._shared_memory is not None:
                await opening.enter_async_context(self._shared_memory)
            if self._ucxx is not None:
                await opening.enter_async_context(self._ucxx)
            self._stack = opening.pop_all()
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
        shared_memory = b"" if self._shared_memory is None else self._shared_memory.address
        ucxx = b"" if self._ucxx is None else self._ucxx.address
        loopback = self._loopback.address if self._takes_loopback else b""
        address = _Address(self._process, self._host, loopback, shared_memory, ucxx, self._access)
        return msgspec.msgpack.encode(address)

    @property
    def inbox(self) -> Inbox:
        return self._inbox

    @property
    def counters(self) -> dict[str, int]:
        """The sums over all links."""
        links = self.counters_by_link.values()
        return {key: sum(link[key] for link in links) for key in Counters().as_dict()}

    @property
    def counters_by_link(self) -> Mapping[LinkClass, dict[str, int]]:
        return {link: counters.as_dict() for link, counters in self._counters.items()}

    def link_to(self, address: bytes) -> LinkClass:
        """Return what lies between this worker and the one at `address`."""
        remote = _decode(address, "a peer")
        if remote.process == self._process:
            return "process"
        return "host" if remote.host == self._host else "network"

    def why_not_on_device(self, address: bytes, endpoint: Endpoint) -> str | None:
        """Say why the worker at `address`, to which `endpoint` leads, cannot write this one's device memory;
        None if it can."""
        if endpoint.put_from_gpu is not None:
            return None
        if endpoint.fill is None:
            if self.link_to(address) == "process" and self._takes_loopback:
                return f"{endpoint.peer} is in this process, whose slots the host copies"
            return f"UCX does not put from GPU to GPU between {self._name} and {endpoint.peer}: {USE_GPU}"
        if not self._access.memory:
            return f"no other process is let into the device memory of {self._name}"
        if self._access.memory not in _decode(address, endpoint.peer).access.writes:
            return f"{endpoint.peer} does not reach {self._access.memory}, where {self._name} computes"
        return None

    async def connect(self, address: bytes, peer: str, *, prefers_gpu: bool = False) -> Endpoint:
        """See `Transport.connect`.

        `prefers_gpu`, the same on both sides: take UCX inside a host too if it alone puts from GPU to GPU.

        Raises:
            ConfigError: the transport that is forced does not reach the peer.
            NativeUnavailable: the peer is on another host, and one of the two has no ucxx.
        """
        remote, link = _decode(address, peer), self.link_to(address)
        counters = self._counters[link]
        self._mapped.discard(peer)
        if link == "process" and self._takes_loopback and remote.loopback:
            return await self._loopback.connect(remote.loopback, peer, counters)
        maps = link != "network" and self._shared_memory is not None and remote.shared_memory
        if maps and not (prefers_gpu and self._reaches_by_ucx_alone(remote)):
            assert self._shared_memory is not None
            endpoint = await self._shared_memory.connect(remote.shared_memory, peer, counters)
            self._mapped.add(peer)
            return endpoint
        if self._config.transport in ("loopback", "shared_memory"):
            beyond = "process" if self._config.transport == "loopback" else "host"
            raise ConfigError(
                f"{self._name}: {peer} is on another {beyond}, which transport={self._config.transport!r} "
                "does not reach; set transport='auto' on both"
            )
        if self._ucxx is None or not remote.ucxx:
            lacking = self._name if self._ucxx is None else peer
            raise NativeUnavailable(
                f"{self._name} and {peer} are on different hosts and {lacking} has no ucxx: there, "
                "`pip install -e '.[cu12]'` (or '.[cu13]') in the clone, and set transport='auto'"
            )
        return await self._ucxx.connect(remote.ucxx, peer, counters)

    def _reaches_by_ucx_alone(self, remote: _Address) -> bool:
        """Whether the two GPUs reach each other's memory by UCX and by nothing else, as where no worker sees
        another GPU than its own."""
        here, there = self._access, remote.access
        if here.memory in there.writes and there.memory in here.writes:
            return False
        return self._ucxx is not None and bool(remote.ucxx) and self._ucxx.has_gpu_like(remote.ucxx)

    def register(self, buffer: Buffer) -> None:
        if self._shared_memory is not None:
            self._shared_memory.register(buffer)
        if self._ucxx is not None:
            self._ucxx.register(buffer)

    def unregister(self, buffer: Buffer) -> None:
        if self._shared_memory is not None:
            self._shared_memory.unregister(buffer)
        if self._ucxx is not None:
            self._ucxx.unregister(buffer)

    def expose(self, memory: memoryview, peer: str) -> RemoteSlot:
        """See `Transport.expose`. For the transport by which `peer` was connected."""
        if self._shared_memory is not None and peer in self._mapped:
            return self._shared_memory.expose(memory, peer)
        if self._ucxx is not None:
            return self._ucxx.expose(memory, peer)  # shares what is exposed with loopback
        return self._loopback.expose(memory, peer)

    async def withdraw(self, remote: RemoteSlot) -> bool:
        if self._shared_memory is not None and is_slot_token(remote.token):
            return await self._shared_memory.withdraw(remote)
        if self._ucxx is not None:
            return await self._ucxx.withdraw(remote)
        return await self._exposures.withdraw(remote)

    async def aclose(self) -> None:
        """Close all endpoints and the inbox. Idempotent."""
        await self._stack.aclose()


def _has_ucxx() -> bool:
    return importlib.util.find_spec("ucxx") is not None or why_missing() is None


def _decode(address: bytes, peer: str) -> _Address:
    try:
        return msgspec.msgpack.decode(address, type=_Address)
    except msgspec.MsgspecError as exc:
        raise ProtocolError(f"the transport address of {peer} is not of this version: {exc}") from exc
