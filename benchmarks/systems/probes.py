"""Plain code, no products: one copy through shared memory by `threads` threads, or one raw socket stream.

`threads`: rollout parameters lie in memory that the trainers map, and trainers copy into them: nothing is
staged. `socket`: a stream of TCP per pair, received into the parameters.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from benchmarks.systems.pairs import Ends
from benchmarks.systems.worker import LIBC, Context
from benchmarks.systems.workloads import ITEM_NBYTES, Shape

UNIT_NBYTES = 8 * 2**20
NUM_VECTORS = 512
ALIGNMENT = 64
PARTNER_NBYTES = 4


class System:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._way = SocketWay(context) if "socket" in context.options else CopyWay(context)
        self.allocate = self._way.allocate

    def setup(self) -> None:
        self._way.setup()

    def push(self, version: int) -> None:
        self._way.push()

    def pull(self, version: int, tokens: object) -> None:
        self._way.pull()

    def close(self) -> None:
        return


class CopyWay:
    """Trainers copy into the memory of the rollouts and say so with a datagram."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._used = 0
        self._offsets: dict[str, int] = {}
        shapes = context.workload.rollout_shapes.values()
        self._nbytes = sum(map(_room, shapes))
        if not context.is_trainer:
            self._memory = os.memfd_create("wbridge-peers")
            os.ftruncate(self._memory, self._nbytes)
            self._arena = self._map(self._memory)

    def allocate(self, name: str, shape: Shape) -> torch.Tensor:
        if self._context.is_trainer:
            return torch.zeros(shape, dtype=torch.bfloat16)
        self._offsets[name] = self._used
        self._used += _room(shape)
        return self._at(self._arena, self._offsets[name], shape).zero_()

    def setup(self) -> None:
        context = self._context
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        name = f"\0wbridge-peers-copy-{os.getpid()}"
        self._socket.bind(name)
        path = "" if context.is_trainer else f"/proc/{os.getpid()}/fd/{self._memory}"
        found = context.exchange((name, path, self._offsets))
        num_trainers = context.workload.job.num_trainers
        self._trainers = [name for name, _, _ in found[:num_trainers]]
        self._rollouts = [name for name, _, _ in found[num_trainers:]]
        if context.is_trainer:
            self._prepare([(path, offsets) for _, path, offsets in found[num_trainers:]])

    def push(self) -> None:
        list(self._pool.map(_run, self._shares))
        for name in self._rollouts:
            self._socket.sendto(b"w", name)

    def pull(self) -> None:
        for _ in self._trainers:
            self._socket.recv(1)

    def _prepare(self, rollouts: list[tuple[str, dict[str, int]]]) -> None:
        num_threads = int(self._context.options["threads"])
        self._pool = ThreadPoolExecutor(num_threads)
        self._arenas = arenas = [self._map(os.open(path, os.O_RDWR)) for path, _ in rollouts]
        for arena in arenas:
            arena.view(torch.uint8)[:: mmap.PAGESIZE].sum()  # pages of this process, too
        self._shares: list[list[Callable[[], object]]] = [[] for _ in range(num_threads)]
        nbytes = [0] * num_threads
        for move in self._context.moves:
            shape = self._context.workload.rollout_shapes[move.target]
            whole = self._at(arenas[move.rollout], rollouts[move.rollout][1][move.target], shape)
            for size, work in _units(move.target_box.of(whole), self._context.part(move)):
                thread = nbytes.index(min(nbytes))
                nbytes[thread] += size
                self._shares[thread].append(work)

    def _map(self, descriptor: int) -> torch.Tensor:
        return torch.frombuffer(mmap.mmap(descriptor, self._nbytes), dtype=torch.bfloat16)

    @staticmethod
    def _at(arena: torch.Tensor, offset: int, shape: Shape) -> torch.Tensor:
        begin = offset // ITEM_NBYTES
        return arena[begin : begin + torch.Size(shape).numel()].view(shape)


class SocketWay:
    """Trainers send their ends of the moves, rollouts receive them where they belong; strided ones staged."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def allocate(self, name: str, shape: Shape) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    def setup(self) -> None:
        context, job = self._context, self._context.workload.job
        listener = socket.create_server((context.address, 0))
        addresses = context.exchange(listener.getsockname())[job.num_trainers :]
        self._sockets: dict[int, socket.socket] = {}
        for partner in range(job.num_rollouts if context.is_trainer else job.num_trainers):
            if context.is_trainer:
                connection = socket.create_connection(addresses[partner])
                connection.sendall(context.rank.to_bytes(PARTNER_NBYTES))
            else:
                connection, _ = listener.accept()
                partner = int.from_bytes(connection.recv(PARTNER_NBYTES, socket.MSG_WAITALL))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets[partner] = connection
        self._ends = Ends(context)
        self._views = {
            partner: [_view(address, nbytes) for address, nbytes in ends]
            for partner, ends in self._ends.by_partner.items()
        }
        self._pool = ThreadPoolExecutor(len(self._views))

    def push(self) -> None:
        def send(partner: int) -> None:
            connection = self._sockets[partner]
            _transfer(connection.sendmsg, self._views[partner])
            connection.recv(1)

        self._ends.gather()
        list(self._pool.map(send, self._views))

    def pull(self) -> None:
        def receive(partner: int) -> None:
            connection = self._sockets[partner]
            _transfer(lambda views: connection.recvmsg_into(views)[0], self._views[partner])

        list(self._pool.map(receive, self._views))
        self._ends.scatter()
        for connection in self._sockets.values():
            connection.send(b"w")


def _room(shape: Shape) -> int:
    return -(-torch.Size(shape).numel() * ITEM_NBYTES // ALIGNMENT) * ALIGNMENT


def _run(works: Iterable[Callable[[], object]]) -> None:
    for work in works:
        work()


def _units(target: torch.Tensor, source: torch.Tensor) -> Iterable[tuple[int, Callable[[], object]]]:
    """Cut one copy into pieces that release the GIL."""
    if not (target.is_contiguous() and source.is_contiguous()):
        yield source.numel() * ITEM_NBYTES, lambda: target.copy_(source)
        return
    for begin in range(0, source.nbytes, UNIT_NBYTES):
        size = min(UNIT_NBYTES, source.nbytes - begin)
        arguments = (target.data_ptr() + begin, source.data_ptr() + begin, size)
        yield size, lambda arguments=arguments: LIBC.memcpy(*arguments)


def _view(address: int, nbytes: int) -> memoryview:

    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def _transfer(some: Callable[[list[memoryview]], int], views: list[memoryview]) -> None:
    """Send or receive all of the views."""
    left: list[Any] = views[:]
    first = 0
    while first < len(left):
        moved = some(left[first : first + NUM_VECTORS])
        if not moved:
            raise EOFError("the other side has closed its socket")
        while moved:
            size = len(left[first])
            if moved < size:
                left[first] = left[first][moved:]
                break
            moved -= size
            first += 1
