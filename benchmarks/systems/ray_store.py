"""Ray's object store: a trainer puts its shard as one object, rollouts map it and copy their part out.

The driver hands the reference on, as its users do; that hop is part of an update.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import ray
import torch

from benchmarks.systems.environments import ROOT
from benchmarks.systems.launch import WorkerFailed, roles
from benchmarks.systems.worker import Context, Worker
from benchmarks.systems.workloads import Workload

TAKES_TOKENS = True
STORE_NBYTES = 9 * 2**30
NUM_CPUS = 8  # slots for actors, not cores


class System:
    def __init__(self, context: Context) -> None:
        self._context = context

    def setup(self) -> None:
        return

    def push(self, version: int) -> list[Any]:
        shard = {name: tensor.view(torch.int16).numpy() for name, tensor in self._context.parameters.items()}
        self._kept = ray.put(shard)  # the version before it goes
        return [self._kept]

    def pull(self, version: int, tokens: list[list[Any]]) -> None:
        shards = [ray.get(reference) for (reference,) in tokens]
        for move in self._context.moves:
            shard = torch.from_numpy(shards[move.trainer][move.source])
            self._context.part(move).view(torch.int16).copy_(move.source_box.of(shard))

    def close(self) -> None:
        return


class Launcher:
    """A cluster of this host alone, with one actor per worker."""

    def __init__(self, system: str, workload: Workload, options: dict[str, str]) -> None:
        warnings.filterwarnings("ignore")  # torch warns that arrays of the store are read-only
        environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        ray.init(
            address="local",
            num_cpus=NUM_CPUS,
            object_store_memory=STORE_NBYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _node_ip_address="127.0.0.1",
            runtime_env={"env_vars": environment},
        )
        actor = ray.remote(num_cpus=1)(Worker)
        self._actors = [
            actor.remote(system, workload, options, role, rank) for role, rank in roles(workload.job)
        ]
        self.call(range(len(self._actors)), "pid")()

    def call(self, indices: Sequence[int], method: str, *arguments: Any) -> Callable[[], list[Any]]:
        references = [getattr(self._actors[index], method).remote(*arguments) for index in indices]

        def wait() -> list[Any]:
            try:
                found: list[Any] = ray.get(references)
            except ray.exceptions.RayError as exc:
                raise WorkerFailed(str(exc)) from exc
            return found

        return wait

    def stop(self) -> None:
        ray.shutdown()
