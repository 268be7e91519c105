"""A job inside one process, in virtual time, whose engines pretend to be on hosts of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

import wbridge
from tests.unit.session.job import PATIENCE_S, Job, gather, rendezvous, settings, toys
from wbridge.engine.exchange import ExchangeMember
from wbridge.engine.receive import ReceiveEngine
from wbridge.testing.streams import LoopDevice

THREE = {"engine-0": 1, "engine-1": 1, "engine-2": 1}


@asynccontextmanager
async def exchanging(
    path: Path,
    mode: str = "sync",
    *,
    num_trainers: int = 2,
    engines: Mapping[str, int] = THREE,
    hosts: Mapping[str, str] | None = None,
    **config: Any,  # settings by name
) -> AsyncIterator[Job]:
    """Trainers on one host, each engine on its own unless `hosts` says where; all connected."""
    trainers, rollouts = toys(num_trainers, engines)
    values = settings(mode, len(engines), **config)
    device = LoopDevice()
    senders = [
        wbridge.SenderAdapter(
            t.source, rendezvous=rendezvous(path), config=values | {"host": "trainers"}, device=device
        )
        for t in trainers
    ]
    receivers = [
        wbridge.ReceiverAdapter(
            r.target,
            rendezvous=rendezvous(path),
            config=values | {"host": (hosts or {}).get(r.engine, r.engine)},
            device=device,
        )
        for r in rollouts
    ]
    async with AsyncExitStack() as stack:
        for adapter in (*senders, *receivers):
            await stack.enter_async_context(adapter)
        await gather(*[adapter.connect for adapter in (*senders, *receivers)])
        with anyio.fail_after(PATIENCE_S):
            yield Job(trainers, rollouts, senders, receivers)


def engine_of(job: Job, index: int) -> ReceiveEngine:
    engine = job.receivers[index]._rollout._engine
    assert engine is not None
    return engine


def member_of(job: Job, index: int) -> ExchangeMember:
    member = engine_of(job, index)._exchange
    assert member is not None, "not in an exchange"
    return member
