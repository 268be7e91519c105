"""A small job inside one process: toy trainers, toy engines and their adapters over loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import anyio
import torch

import wbridge
import wbridge.sync
from tests.models.toy import Rollout, Trainer
from wbridge.device.base import Device
from wbridge.errors import PeerLost, UpdateAborted

T = TypeVar("T")

MODES = ("sync", "sender_overlap", "receiver_overlap", "async")
ENGINES: Mapping[str, int] = {"engine-0": 2, "engine-1": 1}
"""Engines and their tensor-parallel sizes."""

PATIENCE_S = 20.0
"""No test waits this long unless it fails."""


def settings(mode: str, num_engines: int, **more: object) -> dict[str, object]:
    return {
        "mode": mode,
        "num_engines": num_engines,
        "slot_nbytes": 2048,
        "transport": "loopback",
        "connect_timeout_s": PATIENCE_S,
        **more,
    }


def rendezvous(path: Path) -> str:
    return f"file://{path / 'rendezvous'}"


def toys(
    num_trainers: int,
    engines: Mapping[str, int],
    trainer_dtype: torch.dtype = torch.float32,
    rollout_dtype: torch.dtype = torch.float32,
    *,
    trainer_device: str = "cpu",
    rollout_device: str = "cpu",
) -> tuple[list[Trainer], list[Rollout]]:
    trainers = [
        Trainer(rank, num_trainers, trainer_dtype, device=trainer_device) for rank in range(num_trainers)
    ]
    rollouts = [
        Rollout(name, rank, size, rollout_dtype, device=rollout_device)
        for name, size in engines.items()
        for rank in range(size)
    ]
    return trainers, rollouts


async def gather(*calls: Callable[[], Awaitable[T]]) -> list[T]:
    """Run the calls concurrently and return their results in order."""
    results: dict[int, T] = {}

    async def run(index: int, call: Callable[[], Awaitable[T]]) -> None:
        results[index] = await call()

    async with anyio.create_task_group() as tasks:
        for index, call in enumerate(calls):
            tasks.start_soon(run, index, call)
    return [results[index] for index in range(len(calls))]


async def poll_until_lost(receiver: wbridge.ReceiverAdapter) -> PeerLost:
    """Poll until the engine is known to be broken."""
    while True:
        try:
            assert await receiver.poll_requests(wait_s=PATIENCE_S) is None
        except UpdateAborted:
            continue
        except PeerLost as exc:
            return exc


class Job:
    """Trainers and rollouts that are connected; `update` is one version, from send to apply."""

    def __init__(
        self,
        trainers: Sequence[Trainer],
        rollouts: Sequence[Rollout],
        senders: Sequence[wbridge.SenderAdapter],
        receivers: Sequence[wbridge.ReceiverAdapter],
    ) -> None:
        self.trainers, self.rollouts = list(trainers), list(rollouts)
        self.senders, self.receivers = list(senders), list(receivers)

    def of(self, engine: str) -> list[int]:
        """The indices of an engine's workers."""
        return [i for i, rollout in enumerate(self.rollouts) if rollout.engine == engine]

    async def send(self, version: int, metadata: dict[str, object] | None = None) -> list[wbridge.Delivery]:
        """Train all ranks to `version` and publish it."""
        for trainer in self.trainers:
            trainer.set_version(version)
        return await gather(*[lambda s=s: s.send_weights(version, metadata) for s in self.senders])

    async def take(self, *indices: int) -> list[wbridge.Update]:
        """Wait for the next update on these receivers, or on all."""
        chosen = indices or range(len(self.receivers))
        polls = [lambda i=i: self.receivers[i].poll_requests(wait_s=PATIENCE_S) for i in chosen]
        updates = await gather(*polls)
        assert all(updates), "no update in time"
        return [update for update in updates if update]

    async def update(
        self, version: int, metadata: dict[str, object] | None = None
    ) -> tuple[list[wbridge.Delivery], list[wbridge.Update]]:
        """Send a version and take it on every engine."""
        deliveries, updates = await gather(lambda: self.send(version, metadata), lambda: self.take())
        return deliveries, updates  # type: ignore[return-value]  # one list of each kind

    def holds(self, version: int) -> bool:
        return all(rollout.holds(version) for rollout in self.rollouts)


@asynccontextmanager
async def running(
    path: Path,
    mode: str = "sync",
    *,
    num_trainers: int = 2,
    engines: Mapping[str, int] = ENGINES,
    toys_of: tuple[list[Trainer], list[Rollout]] | None = None,
    devices: tuple[Device | None, Device | None] = (None, None),
    sender_devices: Mapping[int, Device] | None = None,
    hooks: Mapping[int, Any] | None = None,  # Any: test doubles with both kinds of hooks
    retarget: Callable[[int, wbridge.Target], wbridge.Target] | None = None,
    receiver_config: Mapping[str, object] | None = None,
    **config: object,
) -> AsyncIterator[Job]:
    """A connected job; every adapter is closed at the end."""
    trainers, rollouts = toys_of or toys(num_trainers, engines)
    values = settings(mode, len(engines), **config)
    senders = [
        wbridge.SenderAdapter(
            t.source,
            rendezvous=rendezvous(path),
            config=values,
            device=(sender_devices or {}).get(i, devices[0]),
        )
        for i, t in enumerate(trainers)
    ]
    receivers = [
        wbridge.ReceiverAdapter(
            retarget(i, r.target) if retarget else r.target,
            rendezvous=rendezvous(path),
            config=values if receiver_config is None else receiver_config,
            device=devices[1],
            hooks=(hooks or {}).get(i),
        )
        for i, r in enumerate(rollouts)
    ]
    async with AsyncExitStack() as stack:
        for adapter in (*senders, *receivers):
            await stack.enter_async_context(adapter)
        await gather(*[adapter.connect for adapter in (*senders, *receivers)])
        with anyio.fail_after(PATIENCE_S):
            yield Job(trainers, rollouts, senders, receivers)


def together(*calls: Callable[[], T]) -> list[T]:
    """Run blocking calls in a thread each and return their results in order."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures: list[Future[T]] = [pool.submit(call) for call in calls]
        return [future.result(PATIENCE_S) for future in futures]


class SyncJob:
    """The same with the blocking adapters."""

    def __init__(
        self,
        trainers: Sequence[Trainer],
        rollouts: Sequence[Rollout],
        senders: Sequence[wbridge.sync.SenderAdapter],
        receivers: Sequence[wbridge.sync.ReceiverAdapter],
    ) -> None:
        self.trainers, self.rollouts = list(trainers), list(rollouts)
        self.senders, self.receivers = list(senders), list(receivers)

    def update(
        self, version: int, metadata: dict[str, object] | None = None
    ) -> tuple[list[wbridge.sync.Delivery], list[wbridge.Update]]:
        for trainer in self.trainers:
            trainer.set_version(version)
        results = together(
            *[lambda s=s: s.send_weights(version, metadata) for s in self.senders],
            *[lambda r=r: r.poll_requests(wait_s=PATIENCE_S) for r in self.receivers],
        )
        return results[: len(self.senders)], results[len(self.senders) :]

    def holds(self, version: int) -> bool:
        return all(rollout.holds(version) for rollout in self.rollouts)


@contextmanager
def running_sync(
    path: Path,
    mode: str = "sync",
    *,
    num_trainers: int = 2,
    engines: Mapping[str, int] = ENGINES,
    hooks: Mapping[int, Any] | None = None,  # Any: test doubles with both kinds of hooks
    receiver_config: Mapping[str, object] | None = None,
    **config: object,
) -> Iterator[SyncJob]:
    trainers, rollouts = toys(num_trainers, engines)
    values = settings(mode, len(engines), **config)
    with ExitStack() as stack:
        senders = [
            stack.enter_context(
                wbridge.sync.SenderAdapter(t.source, rendezvous=rendezvous(path), config=values)
            )
            for t in trainers
        ]
        receivers = [
            stack.enter_context(
                wbridge.sync.ReceiverAdapter(
                    r.target,
                    rendezvous=rendezvous(path),
                    config=values if receiver_config is None else receiver_config,
                    hooks=(hooks or {}).get(i),
                )
            )
            for i, r in enumerate(rollouts)
        ]
        together(*[adapter.connect for adapter in (*senders, *receivers)])
        yield SyncJob(trainers, rollouts, senders, receivers)
