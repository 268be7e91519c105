"""The published PyPI package `wbridge` (another project) on a CPU, with Mooncake's TCP engine below it.

It needs CUDA. `reference_shim` lets streams and events do nothing, and the interpreter runs with `-O`,
since it asserts that tensors are on a GPU: its figures tell of its control path and its copies, not of GPUs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.systems import reference_shim
from benchmarks.systems.worker import Context
from benchmarks.systems.workloads import Box, owned

reference_shim.install()

from wbridge.backend.sender import SenderArgs  # noqa: E402  # needs the shim
from wbridge.frontend.adapters import AdapterContext, ReceiverAdapter, SenderAdapter  # noqa: E402

FIRST_PORT, NUM_PORTS, PORTS_PER_ENGINE, DATA_PORT = 20_000, 10_000, 10, 500
POLL_S = 100e-6
HOST = "127.0.0.1"
Fetchers = Mapping[str, Callable[[], torch.Tensor]]


class System:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._coordinators: list[subprocess.Popen[bytes]] = []

    def setup(self) -> None:
        context, job = self._context, self._context.workload.job
        port = context.exchange(FIRST_PORT + os.getpid() % NUM_PORTS)[0]
        num_engines = job.num_rollouts // job.rollout_parallel
        sockets = [f"ipc://{tempfile.gettempdir()}/wbridge-peers-{port}-{k}.sock" for k in range(num_engines)]
        ports = [port + PORTS_PER_ENGINE * k for k in range(num_engines)]
        if context.is_trainer and context.rank == 0:
            self._coordinators = list(map(_start_coordinator, sockets, ports))
        if context.is_trainer:
            addresses = [f"tcp://{HOST}:{each}" for each in ports]
            arguments = SenderArgs(job.num_trainers, addresses, HOST, port + DATA_PORT, "tcp", False)
            self._adapter = SenderAdapter(self._described(), arguments)
        else:
            engine = context.rank // job.rollout_parallel
            self._adapter = ReceiverAdapter(
                self._described(), sockets[engine], job.rollout_parallel, receiver_staging=False
            )
        context.exchange(None)
        if context.is_trainer:
            self._adapter.connect()
            context.exchange(None)
            return
        connected = threading.Thread(target=context.exchange, args=(None,))
        connected.start()
        while connected.is_alive():
            self._adapter.poll_requests()
            time.sleep(POLL_S)

    def push(self, version: int) -> None:
        event = self._adapter.send_weights({"version": version})
        if event:
            event.synchronize()
        self._adapter.wait_send_complete()

    def pull(self, version: int, tokens: object) -> None:
        while not self._adapter.poll_requests():
            time.sleep(POLL_S)

    def close(self) -> None:
        for process in self._coordinators:
            process.terminate()

    def _described(self) -> Any:
        context, workload = self._context, self._context.workload
        job = workload.job
        size = job.trainer_parallel if context.is_trainer else job.rollout_parallel
        shapes = {tensor.name: tensor.shape for tensor in workload.tensors}
        zeros = {shape: torch.zeros(shape, dtype=torch.bfloat16) for shape in set(shapes.values())}
        fetchers = {name: lambda shape=shape: zeros[shape] for name, shape in shapes.items()}
        held: dict[str, tuple[str, Box, Box]] = {}
        for tensor in workload.tensors:
            box = owned(tensor, size, context.rank)
            name, row = (tensor.name, 0) if context.is_trainer else workload.places[tensor.name]
            held[tensor.name] = name, box.within(box, below=row), box

        def load(weights: Fetchers) -> None:
            for tensor, (name, place, box) in held.items():
                place.of(context.parameters[name]).copy_(box.of(weights[tensor]()))

        rank = context.rank if context.is_trainer else context.rank % size
        return AdapterContext(fetchers, shapes, lambda: context.parameters, load, rank)


def _start_coordinator(socket: str, port: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "wbridge.backend.coordinator", "--ipc", socket, "--tcp-port", str(port)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
