"""The two processes of the `puts` benchmark."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any

import anyio

from wbridge.device.cpu import CpuDevice
from wbridge.transport.base import Endpoint, RemoteSlot
from wbridge.transport.ucx_native import NativeUcxWorker
from wbridge.transport.ucxx import UcxxTransport

PIECE_NBYTES = 8 * 2**20
NUM_SLOTS = 4


class Cost:
    """CPU seconds of this process since this was made; Python calls of the update that counts them."""

    def __init__(self) -> None:
        self._begin_s = time.process_time()
        self.cpu_s, self.calls = 0.0, 0

    def count_calls(self) -> None:
        self.cpu_s = time.process_time() - self._begin_s

        def count(frame: object, event: str, argument: object) -> None:
            self.calls += event == "call"

        sys.setprofile(count)

    def result(self, wakeups: int = 0, taken: list[float] | None = None) -> dict[str, Any]:
        sys.setprofile(None)
        return {"cpu_s": self.cpu_s, "calls": self.calls, "wakeups": wakeups, "taken": taken or []}


def send_puts(pipe: Connection, case: str, num_pieces: int, num_updates: int) -> None:
    anyio.run(_send_puts, pipe, case, num_pieces, num_updates)


async def _send_puts(pipe: Connection, case: str, num_pieces: int, num_updates: int) -> None:
    source = CpuDevice().allocate(num_pieces * PIECE_NBYTES, "pinned").view
    async with connected("sender", pipe, case) as (transport, endpoint):
        cost = Cost()
        for update in range(num_updates + 1):  # the last one only counts calls
            if update == num_updates:
                wakeups = wakeups_of(transport)
                cost.count_calls()
            async with anyio.create_task_group() as tasks:
                for piece in range(num_pieces):
                    token = (await transport.inbox.receive()).payload
                    part = source[piece * PIECE_NBYTES : (piece + 1) * PIECE_NBYTES]
                    remote, notify = RemoteSlot(token, PIECE_NBYTES), piece.to_bytes(4, "little")
                    tasks.start_soon(endpoint.put, part, remote, notify)
        pipe.send(cost.result(wakeups))
        await transport.inbox.receive()


def receive_puts(pipe: Connection, case: str, num_pieces: int, num_updates: int) -> dict[str, Any]:
    return anyio.run(_receive_puts, pipe, case, num_pieces, num_updates)


async def _receive_puts(pipe: Connection, case: str, num_pieces: int, num_updates: int) -> dict[str, Any]:
    device, is_direct = CpuDevice(), case.endswith("direct")
    target, slots = (device.allocate(n * PIECE_NBYTES, "pinned") for n in (num_pieces, NUM_SLOTS))
    async with connected("receiver", pipe, case, (target, slots)) as (transport, endpoint):
        cost, taken = Cost(), []

        async def expose(piece: int) -> None:
            buffer, index = (target, piece) if is_direct else (slots, piece % NUM_SLOTS)
            view = buffer.view[index * PIECE_NBYTES : (index + 1) * PIECE_NBYTES]
            await endpoint.send(transport.expose(view, "sender").token)

        for update in range(num_updates + 1):
            if update == num_updates:
                wakeups = wakeups_of(transport)
                cost.count_calls()
            begin_s = time.perf_counter()
            for piece in range(min(NUM_SLOTS, num_pieces)):
                await expose(piece)
            for _ in range(num_pieces):
                piece = int.from_bytes((await transport.inbox.receive()).payload, "little")
                if not is_direct:
                    at = piece % NUM_SLOTS * PIECE_NBYTES
                    final = target.view[piece * PIECE_NBYTES : (piece + 1) * PIECE_NBYTES]
                    final[:] = slots.view[at : at + PIECE_NBYTES]
                if piece + NUM_SLOTS < num_pieces:
                    await expose(piece + NUM_SLOTS)
            taken.append(time.perf_counter() - begin_s)
        result = cost.result(wakeups, taken[:num_updates])
        await endpoint.send(b"end")
        await endpoint.flush()
    return result


@asynccontextmanager
async def connected(
    name: str, pipe: Connection, case: str, buffers: tuple[Any, ...] = ()
) -> AsyncIterator[tuple[UcxxTransport, Endpoint]]:
    other = "receiver" if name == "sender" else "sender"
    async with UcxxTransport(name, native=case.startswith("native")) as transport:
        for buffer in buffers:
            transport.register(buffer)
        pipe.send(transport.address)
        endpoint = await transport.connect(await anyio.to_thread.run_sync(pipe.recv), other)
        pipe.send(None)
        await anyio.to_thread.run_sync(pipe.recv)
        yield transport, endpoint


def wakeups_of(transport: UcxxTransport) -> int:
    worker = transport._worker
    return worker.num_wakeups if isinstance(worker, NativeUcxWorker) else 0


def send_stream(pipe: Connection, case: str, num_pieces: int, num_updates: int) -> None:
    source = memoryview(bytes(1) * (num_pieces * PIECE_NBYTES))
    with socket.create_connection(pipe.recv()) as stream:
        cost = Cost()
        for _ in range(num_updates):
            stream.recv(1)
            stream.sendall(source)
        cost.count_calls()
        pipe.send(cost.result())


def receive_stream(pipe: Connection, case: str, num_pieces: int, num_updates: int) -> dict[str, Any]:
    target = CpuDevice().allocate(num_pieces * PIECE_NBYTES, "pinned").view
    taken = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname())
        stream, _ = server.accept()
        cost = Cost()
        with stream:
            for _ in range(num_updates):
                begin_s, received = time.perf_counter(), 0
                stream.send(b"x")
                while received < len(target):
                    received += stream.recv_into(target[received:])
                taken.append(time.perf_counter() - begin_s)
        cost.count_calls()
    return cost.result(0, taken)
