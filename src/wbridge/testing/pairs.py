"""Pairs: two transports that a check connects, with slots to put into and memory to put from."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager
from itertools import accumulate
from typing import Any, Final, TypeAlias

from wbridge.device.base import Buffer, Device, MemoryKind
from wbridge.device.cpu import CpuDevice
from wbridge.transport.base import Endpoint, Transport

HOST: Final = CpuDevice()


class Pair:
    """Two open transports; `sender` will connect to `receiver`, whose slots are memory of `device`, of that
    kind."""

    def __init__(
        self, sender: Transport, receiver: Transport, device: Device = HOST, kind: MemoryKind = "pinned"
    ) -> None:
        self.sender, self.receiver = sender, receiver
        self._device, self._kind = device, kind
        self._buffers: list[Buffer] = []

    async def connect(self) -> Endpoint:
        return await self.sender.connect(self.receiver.address, self.receiver.name)

    async def receive(self) -> bytes:
        message = await self.receiver.inbox.receive()
        assert message.peer == self.sender.name
        return message.payload

    def slots(self, sizes: Iterable[int], of: Transport | None = None) -> list[memoryview]:
        """Return zeroed memory that the receiver can expose, or transport `of`."""
        sizes = list(sizes)
        buffer = self._device.allocate(sum(sizes), self._kind, shared=self._kind == "pinned")
        self._buffers.append(buffer)
        (of or self.receiver).register(buffer)
        ends = list(accumulate(sizes))
        return [buffer.addresses[end - nbytes : end] for end, nbytes in zip(ends, sizes, strict=True)]

    def source(self, content: bytes) -> memoryview:
        """Return the addresses of memory of the same kind with this content, for a put."""
        buffer = self._device.allocate(len(content), self._kind)
        self._buffers.append(buffer)
        there: Any = buffer.tensor  # typed `object` there
        there.copy_(there.new_tensor(list(content)))
        self.read(buffer.addresses)  # waits until it is there
        return buffer.addresses

    def read(self, slot: memoryview) -> bytes:
        """Return what is in a slot, or a source."""
        if self._kind == "pinned" or not slot.nbytes:
            return bytes(slot)
        start = _address(slot)
        for buffer in self._buffers:
            offset = start - _address(buffer.addresses) if buffer.nbytes else -1
            if 0 <= offset < buffer.nbytes:
                there: Any = buffer.tensor  # as above
                return bytes(there[offset : offset + slot.nbytes].cpu().numpy())
        raise AssertionError("this is no slot of the pair")


OpenPair: TypeAlias = Callable[[], AbstractAsyncContextManager[Pair]]
"""Opens two transports that can reach each other, and closes them."""


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
