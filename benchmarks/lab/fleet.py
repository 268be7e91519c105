"""One trainer host and some rollout hosts: who lives where, what they need, and the least time for it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.systems.workloads import Box, Job, Workload, qwen3_layer

TRAINER_HOST = "trainers"


@dataclass(frozen=True)
class Fleet:
    """Engines of equal size on every rollout host, each with a replica of the model."""

    num_rollout_hosts: int
    num_layers: int
    hidden: int = 1024
    num_trainers: int = 2
    engines_per_host: int = 1
    tensor_parallel: int = 2

    @property
    def rollout_hosts(self) -> list[str]:
        return [f"rollouts-{k}" for k in range(self.num_rollout_hosts)]

    @property
    def host_names(self) -> list[str]:
        return [TRAINER_HOST, *self.rollout_hosts]

    @property
    def host_of_worker(self) -> list[str]:
        """The host of each worker, trainers first."""
        per_host = self.engines_per_host * self.tensor_parallel
        rollouts = [host for host in self.rollout_hosts for _ in range(per_host)]
        return [TRAINER_HOST] * self.num_trainers + rollouts

    @functools.cached_property
    def workload(self) -> Workload:
        job = Job(
            num_trainers=self.num_trainers,
            trainer_parallel=self.num_trainers,
            num_rollouts=self.num_rollout_hosts * self.engines_per_host * self.tensor_parallel,
            rollout_parallel=self.tensor_parallel,
            is_fused=True,
        )
        return Workload(
            job, [tensor for k in range(self.num_layers) for tensor in qwen3_layer(k, self.hidden)]
        )

    @functools.cached_property
    def needs(self) -> Mapping[str, int]:
        """The bytes that each rollout host needs, each element once."""
        boxes: dict[str, set[tuple[str, Box]]] = {host: set() for host in self.rollout_hosts}
        for move in self.workload.moves:
            boxes[self.host_of_worker[self.num_trainers + move.rollout]].add((move.tensor.name, move.box))
        return {host: sum(box.nbytes for _, box in found) for host, found in boxes.items()}

    @property
    def copy_nbytes(self) -> int:
        """One copy of what is needed: every host needs the whole model."""
        return max(self.needs.values())

    def bound_s(self, mbit: float) -> float:
        """The least time in which links of this rate carry what is needed, headers not counted.

        Trainers send one copy, each rollout host receives what it needs, and what they receive beyond that
        copy they send each other.
        """
        nbytes_per_s = mbit * 1e6 / 8
        forwarded = sum(self.needs.values()) - self.copy_nbytes
        busiest = max(self.copy_nbytes, *self.needs.values(), forwarded / self.num_rollout_hosts)
        return busiest / nbytes_per_s


def layers_for(seconds: float, mbit: float, hidden: int) -> int:
    """How many layers keep a link of this rate busy for so long."""
    layer_nbytes = sum(2 * functools.reduce(lambda a, b: a * b, t.shape) for t in qwen3_layer(0, hidden))
    return max(1, -int(-seconds * mbit * 1e6 / 8 // layer_nbytes))
