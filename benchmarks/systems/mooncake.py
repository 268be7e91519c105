"""Mooncake's transfer engine over TCP: trainers write into the rollouts' own parameters.

A datagram tells a rollout that all is there. Options: `arena`, parameters in one registered region: with
20,000 regions its handshake is refused by its peer. Batches then hold 1,024 tensors, more of which fail.
"""

from __future__ import annotations

import os
import socket

import torch

from benchmarks.systems.pairs import Ends
from benchmarks.systems.worker import Context
from benchmarks.systems.workloads import ITEM_NBYTES, Shape

os.environ |= {"MC_FORCE_TCP": "1", "MC_LOG_LEVEL": "ERROR"}  # read when it is imported

from mooncake.engine import TransferEngine

BATCH = 1024
ALIGNMENT = 64 // ITEM_NBYTES
HOST = "127.0.0.1"


class System:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._arena: torch.Tensor | None = None
        self._used = 0
        if "arena" in context.options:
            shapes = context.workload.shapes(context.role).values()
            self._arena = torch.zeros(sum(map(_room, shapes)), dtype=torch.bfloat16)

    def allocate(self, name: str, shape: Shape) -> torch.Tensor:
        if self._arena is None:
            return torch.zeros(shape, dtype=torch.bfloat16)
        begin = self._used
        self._used += _room(shape)
        return self._arena[begin : begin + torch.Size(shape).numel()].view(shape)

    def setup(self) -> None:
        context = self._context
        self._engine = TransferEngine()
        _check(self._engine.initialize(HOST, "P2PHANDSHAKE", "tcp", ""), "initialize")
        ends = self._ends = Ends(context)
        arena = self._arena
        regions = ends.regions if arena is None else [(arena.data_ptr(), arena.nbytes)]
        addresses, sizes = zip(*regions, strict=True)
        _check(self._engine.batch_register_memory(list(addresses), list(sizes)), "register")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        name = f"\0wbridge-peers-mooncake-{os.getpid()}"
        self._socket.bind(name)
        found = context.exchange((name, f"{HOST}:{self._engine.get_rpc_port()}", ends.by_partner))
        self._rollouts = [name for name, _, _ in found[context.workload.job.num_trainers :]]
        self._writes = []
        if context.is_trainer:
            for rollout, (_, host, theirs) in enumerate(found[context.workload.job.num_trainers :]):
                if context.rank in theirs:
                    pairs = zip(ends.by_partner[rollout], theirs[context.rank], strict=True)
                    batch = [(ours[0], other[0], ours[1]) for ours, other in pairs]
                    size = len(batch) if arena is None else BATCH
                    self._writes += [(host, batch[k : k + size]) for k in range(0, len(batch), size)]

    def push(self, version: int) -> None:
        for host, batch in self._writes:
            sources, targets, sizes = map(list, zip(*batch, strict=True))
            _check(self._engine.batch_transfer_sync_write(host, sources, targets, sizes), "write")
        for name in self._rollouts:
            self._socket.sendto(b"w", name)

    def pull(self, version: int, tokens: object) -> None:
        for _ in range(self._context.workload.job.num_trainers):
            self._socket.recv(1)
        self._ends.scatter()

    def close(self) -> None:
        self._socket.close()


def _room(shape: Shape) -> int:
    return -(-torch.Size(shape).numel() // ALIGNMENT) * ALIGNMENT


def _check(code: int, operation: str) -> None:
    if code:
        raise RuntimeError(f"Mooncake: {operation} returned {code}")
