"""torchstore on Monarch: `put_state_dict` of a trainer's shard, `get_state_dict` in place by the rollouts.

It chooses its own way: shared memory on one host. Where rollouts split the model differently, they get the
trainers' shards whole and copy their part. The put ends before the get begins.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import monarch.actor
import torch
from monarch.actor import Actor, this_host

from benchmarks.systems.launch import WorkerFailed, roles
from benchmarks.systems.worker import Context, Timing, Worker
from benchmarks.systems.workloads import Job, Parameters, Workload

endpoint = monarch.actor.endpoint


def asynchronous_endpoint(method: Callable[..., Any]) -> Any:
    """An endpoint whose method need not be a coroutine function."""
    if inspect.iscoroutinefunction(method):
        return endpoint(method)

    @functools.wraps(method)
    async def run(*arguments: Any, **named: Any) -> Any:
        return method(*arguments, **named)

    return endpoint(run)


# The published torchstore mixes both kinds in one actor, which no Monarch that runs without CUDA takes.
monarch.actor.endpoint = asynchronous_endpoint

import torchstore  # noqa: E402  # needs the line above

TAKES_TOKENS = True
SHUTDOWN_TIMEOUT_S = 10.0


class System:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._staged: list[Parameters] = []

    def setup(self) -> None:
        context = self._context
        if not context.is_trainer and not self._is_same_layout:
            shapes = context.workload.trainer_shapes
            self._staged = [
                {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
                for _ in range(context.workload.job.num_trainers)
            ]

    async def push(self, version: int) -> None:
        await torchstore.put_state_dict(self._context.parameters, key=f"shard-{self._context.rank}")

    async def pull(self, version: int, tokens: object) -> None:
        context = self._context
        if self._is_same_layout:
            await torchstore.get_state_dict(key="shard-0", user_state_dict=context.parameters)
            return
        for trainer, shard in enumerate(self._staged):
            await torchstore.get_state_dict(key=f"shard-{trainer}", user_state_dict=shard, strict=False)
        for move in context.moves:
            context.part(move).copy_(move.source_box.of(self._staged[move.trainer][move.source]))

    def close(self) -> None:
        return

    @property
    def _is_same_layout(self) -> bool:
        return self._context.workload.job == Job()


class WorkerActor(Actor):
    """A worker; what its system starts is awaited here."""

    def __init__(self, *arguments: Any) -> None:
        self._worker = Worker(*arguments)

    @endpoint
    async def run(self, method: str, arguments: tuple[Any, ...]) -> Any:
        cpu_s = time.process_time()
        found = getattr(self._worker, method)(*arguments)
        if isinstance(found, Timing):
            await found.result
            return tuple(Timing(found.begin_s, time.monotonic(), time.process_time() - cpu_s, None))
        return found


class Launcher:
    """One actor process per worker, beside torchstore's own volume."""

    def __init__(self, system: str, workload: Workload, options: dict[str, str]) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(self._start(system, workload, options))

    def call(self, indices: Sequence[int], method: str, *arguments: Any) -> Callable[[], list[Any]]:
        async def run() -> list[Any]:
            calls = [self._actors[index].run.call_one(method, arguments) for index in indices]
            return await asyncio.gather(*calls)

        task = self._loop.create_task(run())

        def wait() -> list[Any]:
            try:
                return self._loop.run_until_complete(task)
            except Exception as exc:  # whatever it raises ends the run
                raise WorkerFailed(str(exc)) from exc

        return wait

    def stop(self) -> None:
        try:
            self._loop.run_until_complete(asyncio.wait_for(torchstore.shutdown(), SHUTDOWN_TIMEOUT_S))
        except Exception as exc:  # the process ends after this
            print(f"shutdown: {str(exc)[:200]}", file=sys.stderr)

    async def _start(self, system: str, workload: Workload, options: dict[str, str]) -> None:
        await torchstore.initialize()
        self._actors: list[Any] = []
        for role, rank in roles(workload.job):
            processes = this_host().spawn_procs(per_host={"gpus": 1})
            actor = processes.spawn(f"{role}{rank}", WorkerActor, system, workload, options, role, rank)
            self._actors.append(actor)
