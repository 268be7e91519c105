"""The other process of `test_ucxx_processes`: serves one connection until told to stop.

Usage: ucxx_peer.py ADDRESS, in hex. Connects, sends its own address, then obeys.
"""

from __future__ import annotations

import sys

import anyio

from wbridge.transport.base import RemoteSlot
from wbridge.transport.ucxx import UcxxTransport


async def main(address: str) -> None:
    async with UcxxTransport("child") as transport:
        endpoint = await transport.connect(bytes.fromhex(address), "parent")
        await endpoint.send(transport.address)
        slot = bytearray()
        async for message in transport.inbox:
            command, _, argument = message.payload.partition(b" ")
            if command == b"expose":
                slot = bytearray(int(argument))
                await endpoint.send(transport.expose(memoryview(slot), "parent").token)
            elif command == b"stamped":
                await endpoint.send(b"ok" if slot == argument * len(slot) else b"torn")
            elif command == b"echo":
                await endpoint.send(argument)
            elif command == b"put":
                nbytes = int(argument[16:])
                await endpoint.put(memoryview(bytes([1]) * nbytes), RemoteSlot(argument[:16], nbytes), b"put")
            else:
                return


anyio.run(main, sys.argv[1])
