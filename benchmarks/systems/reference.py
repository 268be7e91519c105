"""The published PyPI package `wbridge` (another project) on a CPU, with Mooncake's TCP engine below it.

It needs CUDA. `reference_shim` lets streams and events do nothing, and the interpreter runs with `-O`,
since it asserts that tensors are on a GPU: its figures tell of its control path and its copies, not of GPUs.

What it finds out about the layout takes it minutes. It is kept in its environment for later runs, which
add the time that it took then to `connect_s`.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.systems import reference_shim
from benchmarks.systems.worker import Context
from benchmarks.systems.workloads import Box, owned

reference_shim.install()

from wbridge.backend.sender import SenderArgs  # noqa: E402  # needs the shim
from wbridge.frontend import adapters  # noqa: E402
from wbridge.frontend.adapters import AdapterContext, ReceiverAdapter, SenderAdapter  # noqa: E402
from wbridge.utils.data import LoadSpec  # noqa: E402

FIRST_PORT, NUM_PORTS, PORTS_PER_ENGINE, DATA_PORT = 20_000, 10_000, 10, 500
POLL_S = 100e-6
HOST = "127.0.0.1"
KEPT = Path(sys.prefix) / "layouts"
Fetchers = Mapping[str, Callable[[], torch.Tensor]]


class System:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._coordinators: list[subprocess.Popen[bytes]] = []
        self.reused_s = 0.0
        self._find_layout = adapters.infer_load_spec
        adapters.infer_load_spec = self._known_layout

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

    def _known_layout(self, *arguments: Any) -> Any:
        """What it finds out, or has found out in an earlier run, for a worker that holds the same."""
        context = self._context
        held = repr((context.workload.job, context.workload.tensors, context.role, context.rank))
        path = KEPT / hashlib.sha256(held.encode()).hexdigest()
        if path.exists():
            self.reused_s, entries = json.loads(path.read_text())
            return LoadSpec(
                {
                    source: {target: list(map(_pair, pairs)) for target, pairs in targets.items()}
                    for source, targets in entries.items()
                }
            )
        begin_s = time.monotonic()
        found = self._find_layout(*arguments)
        KEPT.mkdir(exist_ok=True)
        written = path.with_suffix(".written")
        written.write_text(json.dumps((time.monotonic() - begin_s, found.entries)))
        written.rename(path)
        return found

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


def _pair(shards: list[list[list[int]]]) -> tuple[Any, ...]:
    return tuple([tuple(span) for span in shard] for shard in shards)


def _start_coordinator(socket: str, port: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "wbridge.backend.coordinator", "--ipc", socket, "--tcp-port", str(port)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
