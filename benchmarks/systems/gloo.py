"""torch.distributed with gloo over TCP. Options: `broadcast`; else exactly what is needed is sent.

With `broadcast`, as frameworks do it: trainers gather each whole tensor, the first broadcasts it to all
rollouts, which load their part from a buffer. The buffers are kept, as a GPU's caching allocator keeps them.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from benchmarks.links.hosts import INTERFACE
from benchmarks.systems.worker import LOOPBACK, Context
from benchmarks.systems.workloads import Tensor, owned

BUCKET_NBYTES = 512 * 2**20
FIRST_PORT, NUM_PORTS = 20_000, 10_000


class System:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._kept: dict[tuple[str, int], torch.Tensor] = {}

    def setup(self) -> None:
        context, job = self._context, self._context.workload.job
        os.environ["GLOO_SOCKET_IFNAME"] = "lo" if context.address == LOOPBACK else INTERFACE
        address, port = context.exchange((context.address, FIRST_PORT + os.getpid() % NUM_PORTS))[0]
        rank = context.rank + (0 if context.is_trainer else job.num_trainers)
        size = job.num_trainers + job.num_rollouts
        dist.init_process_group("gloo", init_method=f"tcp://{address}:{port}", rank=rank, world_size=size)
        self._trainers = dist.new_group(list(range(job.num_trainers)))
        self._outwards = dist.new_group([0, *range(job.num_trainers, size)])
        self._staged = [
            (part, torch.empty_like(part, memory_format=torch.contiguous_format))
            for part in map(context.part, context.moves)
            if not part.is_contiguous()
        ]
        dist.barrier()

    def push(self, version: int) -> None:
        if "broadcast" in self._context.options:
            for bucket in self._buckets():
                self._broadcast([self._gathered(tensor) for tensor in bucket])
            return
        first = self._context.workload.job.num_trainers
        parts = ((self._context.part(move), first + move.rollout) for move in self._context.moves)
        for work in [dist.isend(part.view(torch.uint8), rank) for part, rank in parts]:
            work.wait()

    def pull(self, version: int, tokens: object) -> None:
        if "broadcast" in self._context.options:
            for bucket in self._buckets():
                whole = [self._buffer(tensor, 0) for tensor in bucket]
                self._broadcast(whole)
                for tensor, value in zip(bucket, whole, strict=True):
                    self._load(tensor, value)
            return
        staged = iter(self._staged)
        works = []
        for move in self._context.moves:
            part = self._context.part(move)
            buffer = part if part.is_contiguous() else next(staged)[1]
            works.append(dist.irecv(buffer.view(torch.uint8), move.trainer))
        for work in works:
            work.wait()
        for part, buffer in self._staged:
            part.copy_(buffer)

    def close(self) -> None:
        dist.destroy_process_group()

    def _buckets(self) -> list[list[Tensor]]:
        found: list[list[Tensor]] = [[]]
        nbytes = 0
        for tensor in self._context.workload.tensors:
            size = owned(tensor, 1, 0).nbytes
            if found[-1] and nbytes + size > BUCKET_NBYTES:
                found.append([])
                nbytes = 0
            found[-1].append(tensor)
            nbytes += size
        return found

    def _gathered(self, tensor: Tensor) -> torch.Tensor:
        held, job = self._context.parameters[tensor.name], self._context.workload.job
        if tensor.split is None or job.trainer_parallel == 1:
            return held
        parts = [self._buffer(tensor, k + 1, shape=held.shape) for k in range(job.num_trainers)]
        dist.all_gather([p.view(torch.uint8) for p in parts], held.view(torch.uint8), group=self._trainers)
        if self._context.rank:
            return held
        return torch.cat(parts, dim=tensor.split, out=self._buffer(tensor, 0))

    def _broadcast(self, tensors: list[torch.Tensor]) -> None:
        if self._context.is_trainer and self._context.rank:
            return
        flat = (tensor.view(torch.uint8) for tensor in tensors)
        for work in [dist.broadcast(each, 0, group=self._outwards, async_op=True) for each in flat]:
            work.wait()

    def _buffer(self, tensor: Tensor, key: int, shape: torch.Size | None = None) -> torch.Tensor:
        kept = self._kept.get((tensor.name, key))
        if kept is None:
            kept = torch.empty(shape or tensor.shape, dtype=torch.bfloat16)
            self._kept[tensor.name, key] = kept
        return kept

    def _load(self, tensor: Tensor, value: torch.Tensor) -> None:
        workload = self._context.workload
        name, row = workload.places[tensor.name]
        part = owned(tensor, workload.job.rollout_parallel, self._context.rank).of(value)
        self._context.parameters[name][row : row + part.shape[0]].copy_(part)
