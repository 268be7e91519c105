"""This package. Options: `shared` (parameters that writers reach), `idle` (one long poll), `rendezvous`, and
settings by their names: those that `config_of` reads.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import anyio
import torch

import wbridge
import wbridge.sync
from benchmarks.systems.worker import IDLE_S, LIBC, Context
from benchmarks.systems.workloads import Workload, owned
from wbridge.config import Config
from wbridge.transport.host import process_token
from wbridge.transport.select import open_transports

NOTIFICATION = bytes(64)
NUM_WARM_UP = 50


class System:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._options = context.options
        self._adapter: wbridge.sync.SenderAdapter | wbridge.sync.ReceiverAdapter

    def setup(self) -> None:
        context = self._context
        if "shared" in self._options and not context.is_trainer:
            wbridge.share_memory(context.parameters.values())
        directory = Path(tempfile.gettempdir())
        rendezvous = context.exchange(f"file://{directory}/wbridge-peers-{os.getpid()}")[0]
        rendezvous = self._options.get("rendezvous", rendezvous)
        described, config = describe(context), config_of(context.workload, self._options)
        if isinstance(described, wbridge.Source):
            self._adapter = wbridge.sync.SenderAdapter(described, rendezvous=rendezvous, config=config)
        else:
            self._adapter = wbridge.sync.ReceiverAdapter(described, rendezvous=rendezvous, config=config)
        self._adapter.connect()

    def push(self, version: int) -> None:
        assert isinstance(self._adapter, wbridge.sync.SenderAdapter)
        self._adapter.send_weights(version)

    def pull(self, version: int, tokens: object) -> None:
        assert isinstance(self._adapter, wbridge.sync.ReceiverAdapter)
        wait_s = 60.0 if "idle" in self._options else 1.0
        while (update := self._adapter.poll_requests(wait_s=wait_s)) is None or update.version != version:
            pass

    def extras(self, times: int) -> dict[str, float]:
        """Puts and heartbeats; and, of `times` repetitions, the way of a notification, and bare copies."""
        found: dict[str, float] = {"num_puts": self._adapter.counters["puts"]}
        if not self._context.is_trainer and "idle" in self._options:
            found["num_heartbeats"] = IDLE_S / Config().heartbeat_s
        if times == 0:
            return found
        if len(self._context.workload.tensors) == 1:
            found |= {"notify_s": anyio.run(self._notify, NUM_WARM_UP + 10 * times)}
        elif self._options.get("transport") == "ucxx":
            side = "gather_s" if self._context.is_trainer else "scatter_s"
            found |= {side: self._bare_copy(times)}
        return found

    def close(self) -> None:
        self._adapter.close()

    async def _notify(self, times: int) -> float:
        """Median seconds of a 64-byte message one way, over a transport of the same kind."""
        name, config = self._context.role, Config(transport=self._options.get("transport", "auto"))
        async with open_transports(config, process_token(), name=name) as transports:
            addresses = self._context.exchange(transports.address)
            other = addresses[1] if self._context.is_trainer else addresses[0]
            endpoint = await transports.connect(other, "other")
            taken = []
            for _ in range(times):
                begin_s = time.perf_counter()
                if self._context.is_trainer:
                    await endpoint.send(NOTIFICATION)
                    await transports.inbox.receive()
                    taken.append((time.perf_counter() - begin_s) / 2)
                else:
                    await transports.inbox.receive()
                    await endpoint.send(NOTIFICATION)
            self._context.exchange(None)  # neither leaves while the other still listens
        return statistics.median(taken[NUM_WARM_UP:] or [0.0])

    def _bare_copy(self, times: int) -> float:
        """Median seconds in which the parameters are copied to one buffer, or from it, on one thread."""
        tensors = self._context.parameters.values()
        buffer = torch.zeros(sum(t.nbytes for t in tensors), dtype=torch.uint8).fill_(1)
        taken = []
        for _ in range(times):
            begin_s, place = time.perf_counter(), buffer.data_ptr()
            for tensor in tensors:
                ends = (place, tensor.data_ptr()) if self._context.is_trainer else (tensor.data_ptr(), place)
                LIBC.memcpy(*ends, tensor.nbytes)
                place += tensor.nbytes
            taken.append(time.perf_counter() - begin_s)
        return statistics.median(taken)


def config_of(workload: Workload, options: Mapping[str, str]) -> dict[str, object]:
    """The settings of a job."""
    num_engines = workload.job.num_rollouts // workload.job.rollout_parallel
    found: dict[str, object] = {"mode": "sync", "num_engines": num_engines, "transport": "auto"}
    found |= {name: options[name] for name in ("transport", "mode", "relays") if name in options}
    counts = ("slot_nbytes", "num_slots", "copy_threads")
    found |= {name: int(options[name]) for name in counts if name in options}
    return found | {name: float(options[name]) for name in ("relay_patience_s",) if name in options}


def describe(context: Context) -> wbridge.Source | wbridge.Target:
    """This worker for its adapter: who it is, what it holds, and how weights are loaded into it."""
    workload, job, rank = context.workload, context.workload.job, context.rank

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """What a framework's `load_weights` does: cut out this rank's part, into its place."""
        for name, weight in weights:
            tensor = workload.tensors[workload.index[name]]
            if context.is_trainer:
                held = owned(tensor, job.trainer_parallel, rank)
                context.parameters[name].copy_(held.of(weight))
            else:
                target, row = workload.places[name]
                part = owned(tensor, job.rollout_parallel, rank).of(weight)
                context.parameters[target][row : row + part.shape[0]].copy_(part)

    checkpoint = {tensor.name: wbridge.TensorSpec(tensor.shape, "bfloat16") for tensor in workload.tensors}
    described = {"checkpoint": checkpoint, "parameters": context.parameters, "load_weights": load}
    if context.is_trainer:
        return wbridge.Source(
            worker=wbridge.WorkerId("trainer", "trainer", (job.num_trainers,), (rank,)), **described
        )
    engine, place = divmod(rank, job.rollout_parallel)
    worker = wbridge.WorkerId("rollout", f"engine-{engine}", (job.rollout_parallel,), (place,))
    return wbridge.Target(worker=worker, **described)
