"""The other process of `test_ucxx_processes`: serves one connection until told to stop."""

from __future__ import annotations

import ctypes
import os
from multiprocessing.connection import Connection

import anyio

from wbridge.device.cpu import CpuDevice
from wbridge.transport.base import RemoteSlot
from wbridge.transport.ucxx import UcxxTransport


def serve(address: bytes, way: str, transports: str, go_on: Connection) -> None:
    """Connect over these of UCX's transports, `native` or by `python`; send the own address, then obey."""
    os.environ["UCX_TLS"] = transports  # nothing has loaded UCX yet
    anyio.run(main, address, way, go_on)


async def main(address: bytes, way: str, go_on: Connection) -> None:
    device = CpuDevice()
    async with UcxxTransport("child", native=way == "native") as transport:
        endpoint = await transport.connect(address, "parent")
        await endpoint.send(transport.address)
        buffer = device.allocate(0, "pinned")
        async for message in transport.inbox:
            command, _, argument = message.payload.partition(b" ")
            if command == b"expose":
                transport.unregister(buffer)
                buffer = device.allocate(int(argument), "pinned")
                transport.register(buffer)
                await endpoint.send(transport.expose(buffer.view, "parent").token)
            elif command == b"again":
                await endpoint.send(transport.expose(buffer.view, "parent").token)
            elif command == b"stamped":
                await endpoint.send(b"ok" if buffer.view == argument * buffer.nbytes else b"torn")
            elif command == b"echo":
                await endpoint.send(argument)
            elif command == b"put":
                token, nbytes = bytes.fromhex(argument[:-16].decode()), int(argument[-16:])
                await endpoint.put(memoryview(bytes([1]) * nbytes), RemoteSlot(token, nbytes), b"put")
            elif command == b"hold":
                await endpoint.send(b"holding")
                await endpoint.flush()
                ctypes.PyDLL(None).read(go_on.fileno(), ctypes.create_string_buffer(1), 1)  # with the GIL
            elif command == b"counters":
                await endpoint.send(b"%d" % transport.counters["one_sided_nbytes"])
            else:
                return
