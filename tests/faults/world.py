"""A whole job in one loop under virtual time; its users restart what died, and look for what is left."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

import wbridge
from tests.models.toy import Rollout, Trainer
from tests.unit.session.job import rendezvous, settings
from wbridge.config import Config
from wbridge.device.base import Buffer, MemoryKind
from wbridge.errors import (
    AuthenticationError,
    BarrierTimeout,
    ConfigError,
    EndpointClosed,
    InternalError,
    LayoutError,
    PeerLost,
    ProtocolError,
    UpdateAborted,
    WBridgeError,
)
from wbridge.layout.source_map import SourceMap
from wbridge.session.worker import discover_map
from wbridge.testing.clock import MOMENT_S
from wbridge.testing.streams import LoopDevice
from wbridge.transport import loopback

Adapter = wbridge.SenderAdapter | wbridge.ReceiverAdapter

DEADLINES = {
    "connect_timeout_s": 8.0,
    "update_timeout_s": 6.0,
    "hold_timeout_s": 3.0,
    "relay_patience_s": 0.5,
    "fence_timeout_s": 3.0,
    "coordinator_timeout_s": 3.0,
    "close_timeout_s": 2.0,
    "heartbeat_s": 2.0,
}
LIMIT_S = 60.0
"""No call of a user may take longer: more than all of the above together."""
POLL_S = 8.0
"""How long a user waits for one update."""
NUM_ROUNDS = 6
"""Within so many attempts at a new version, restarting what has died, one goes through."""

FINAL = (AuthenticationError, ConfigError, EndpointClosed, InternalError, LayoutError, ProtocolError)
"""Errors after which a trainer is restarted; others are worth one more attempt."""


class Injected(RuntimeError):
    """A failure that the test puts where nothing fails by itself."""


class Outcome(msgspec.Struct):
    """How a user's call ended: `error` is None, a `WBridgeError`, or what the test did to the call itself."""

    call: str
    value: Any  # Any: each call has its own result
    error: BaseException | None


class Hooks:
    """A server that pauses around an update; with `refuses` it does not want any."""

    def __init__(self) -> None:
        self.is_paused = False
        self.refuses = 0

    async def before_apply(self) -> None:
        self.is_paused = True
        await asyncio.sleep(0)
        if self.refuses:
            self.refuses -= 1
            raise Injected("the server is busy")

    async def after_apply(self, update: wbridge.Update | None) -> None:
        await asyncio.sleep(0)
        self.is_paused = False


def _repack() -> None:
    """What a backend does with new weights."""


class TrackedDevice(LoopDevice):
    """Knows which of its memory is still held by anybody."""

    def __init__(self, delay_s: float) -> None:
        super().__init__(delay_s=delay_s)
        self.buffers: weakref.WeakSet[Buffer] = weakref.WeakSet()

    def allocate(self, nbytes: int, kind: MemoryKind, *, shared: bool = False) -> Buffer:
        buffer = super().allocate(nbytes, kind, shared=shared)
        self.buffers.add(buffer)
        return buffer


class World:
    """The users of one job: trainer ranks and engines, each call in an asyncio task of its own."""

    def __init__(
        self,
        path: Path,
        mode: str = "sync",
        *,
        engines: Sequence[int] = (2, 1),
        delay_s: float = 0.001,
        apart: bool = False,
        **more: object,
    ) -> None:
        """`apart`: each engine is on a host of its own, so that they pass weights on to each other."""
        num_trainers = 2
        self.path = path
        self._apart = apart
        self.config = settings(mode, len(engines), **DEADLINES | {"checksum": "on"} | more)
        self.device = TrackedDevice(delay_s)
        self.trainers = [Trainer(rank, num_trainers) for rank in range(num_trainers)]
        self.rollouts = [
            Rollout(f"engine-{i}", rank, size) for i, size in enumerate(engines) for rank in range(size)
        ]
        self.hooks = [Hooks() for _ in self.rollouts]
        self.senders: list[wbridge.SenderAdapter] = [self._sender(i) for i in range(num_trainers)]
        self.receivers: list[wbridge.ReceiverAdapter] = [self._receiver(i) for i in range(len(self.rollouts))]
        self.outcomes: list[Outcome] = []
        self.version = 0
        self.resends = False
        self._background: list[asyncio.Task[Outcome]] = []

    # Making and ending adapters --------------------------------------------------------------------------

    def _sender(self, index: int) -> wbridge.SenderAdapter:
        source = self.trainers[index].source
        source = msgspec.structs.replace(source, source_map=_source_map("trainer", index, len(self.trainers)))
        return wbridge.SenderAdapter(
            source,
            rendezvous=rendezvous(self.path),
            config=self.config | self._host("trainers"),
            device=self.device,
        )

    def _host(self, name: str) -> dict[str, object]:
        return {"host": name} if self._apart else {}

    def _receiver(self, index: int, **more: object) -> wbridge.ReceiverAdapter:
        rollout = self.rollouts[index]
        target = msgspec.structs.replace(
            rollout.target,
            source_map=_source_map(rollout.engine, rollout.rank, rollout.size),
            after_apply=_repack,
        )
        return wbridge.ReceiverAdapter(
            target,
            rendezvous=rendezvous(self.path),
            config=self.config | self._host(rollout.engine) | more,
            device=self.device,
            hooks=self.hooks[index] if index < 2 else None,  # a server that need not pause answers at once
        )

    def of_engine(self, engine: str) -> list[int]:
        return [i for i, rollout in enumerate(self.rollouts) if rollout.engine == engine]

    @property
    def adapters(self) -> list[Adapter]:
        return [*self.senders, *self.receivers]

    async def connect(self, adapters: Iterable[Adapter] | None = None) -> list[Outcome]:
        chosen = self.adapters if adapters is None else list(adapters)
        return await self.all([(f"connect {i}", adapter.connect) for i, adapter in enumerate(chosen)])

    async def close(self, adapters: Iterable[Adapter]) -> list[Outcome]:
        return await self.all([("close", adapter.aclose) for adapter in adapters])

    def stranger(self, **more: object) -> wbridge.ReceiverAdapter:
        """One more adapter for the last worker, with other settings."""
        return self._receiver(len(self.rollouts) - 1, **more)

    async def restart(self, senders: Iterable[int], engines: Iterable[str]) -> None:
        """Close these adapters and connect new ones in their place; a new rollout has other weights first."""
        ranks = sorted(set(senders))
        workers = sorted({i for engine in engines for i in self.of_engine(engine)})
        await self.close([*(self.senders[i] for i in ranks), *(self.receivers[i] for i in workers)])
        for i in ranks:
            self.senders[i] = self._sender(i)
        for i in workers:
            self.receivers[i], self.hooks[i].is_paused = self._receiver(i), False
            for tensor in self.rollouts[i].parameters.values():
                tensor.fill_(-1.0)
        await self.connect([*(self.senders[i] for i in ranks), *(self.receivers[i] for i in workers)])

    def close_owner(self, owner: str) -> None:
        """Close the adapter that `owner` names, from another task of its user."""
        for adapter, toy in zip(self.adapters, [*self.trainers, *self.rollouts], strict=True):
            described = toy.source if isinstance(toy, Trainer) else toy.target
            if owner == f"wbridge {described.worker}":
                self._background.append(asyncio.create_task(self.attempt("close it", adapter.aclose)))

    # Calls of users --------------------------------------------------------------------------------------

    async def attempt(self, name: str, call: Callable[[], Awaitable[Any]]) -> Outcome:
        """Call in a task of its own, and accept a result, a `WBridgeError`, or what the test injected."""

        async def run() -> Any:
            return await call()

        return await self._account(name, asyncio.create_task(run()))

    async def _account(self, name: str, task: asyncio.Task[Any]) -> Outcome:
        done, _ = await asyncio.wait({task}, timeout=LIMIT_S)
        if not done:
            stack = "\n".join(str(frame) for frame in task.get_stack())
            raise AssertionError(f"{name} hangs: {stack}")
        outcome = Outcome(name, None, None)
        if task.cancelled():
            outcome.error = asyncio.CancelledError()
        elif (error := task.exception()) is not None:
            if not isinstance(error, WBridgeError | Injected):
                raise AssertionError(f"{name} raised {error!r}") from error
            outcome.error = error
        else:
            outcome.value = task.result()
        self.outcomes.append(outcome)
        return outcome

    async def all(self, calls: Sequence[tuple[str, Callable[[], Awaitable[Any]]]]) -> list[Outcome]:
        return list(await asyncio.gather(*[self.attempt(name, call) for name, call in calls]))

    async def start(self, name: str, call: Callable[[], Awaitable[Any]]) -> asyncio.Task[Any]:
        """Call, and let the scenario cancel it; `settle` accounts for how it ended."""

        async def run() -> Any:
            return await call()

        task = asyncio.create_task(run())
        self._background.append(asyncio.create_task(self._account(name, task)))
        await passes()
        return task

    def sends(self, *ranks: int) -> list[tuple[str, Callable[[], Awaitable[Any]]]]:
        version = self.version

        async def send(rank: int) -> wbridge.Delivery:
            try:
                return await self.senders[rank].send_weights(version, {"v": version})
            except Injected:
                if not self.resends:
                    raise
            return await self.senders[rank].send_weights(version, {"v": version})

        return [(f"send {r}", functools.partial(send, r)) for r in ranks or range(len(self.senders))]

    def polls(self, *indices: int, wait_s: float = POLL_S) -> list[tuple[str, Callable[[], Awaitable[Any]]]]:
        chosen = indices or range(len(self.receivers))
        return [
            (f"poll {i}", functools.partial(self.receivers[i].poll_requests, wait_s=wait_s)) for i in chosen
        ]

    def train(self) -> int:
        self.version += 1
        for trainer in self.trainers:
            trainer.set_version(self.version)
        return self.version

    async def update(self, *, wait_s: float = POLL_S) -> list[Outcome]:
        self.train()
        return await self.all([*self.sends(), *self.polls(wait_s=wait_s)])

    # What must hold afterwards ---------------------------------------------------------------------------

    async def settle(self) -> None:
        """Wait for the calls that were started for later."""
        while self._background:
            await self._background.pop()

    async def check_weights(self) -> None:
        """No worker says that it holds a version, and does not."""

        async def step(index: int) -> int | None:
            async with self.receivers[index].step() as version:
                return version

        for i, rollout in enumerate(self.rollouts):
            outcome = await self.attempt("step", functools.partial(step, i))
            if isinstance(outcome.error, Injected | asyncio.CancelledError):  # this very call was cut
                outcome = await self.attempt("step again", functools.partial(step, i))
            if outcome.error is None:
                assert holds(rollout, outcome.value), f"{rollout.target.worker}: {outcome.value} is not whole"
            else:
                assert isinstance(outcome.error, UpdateAborted), outcome
                assert self.receivers[i].version is None

    async def recover(self) -> None:
        """Publish versions until one reaches everybody, restarting what turns out to be dead."""
        await self.settle()
        await self.check_weights()
        suspects: set[int] = set()
        for _ in range(NUM_ROUNDS):
            outcomes = await self.update()
            await self.check_weights()
            sent, taken = outcomes[: len(self.senders)], outcomes[len(self.senders) :]
            if all(o.error is None and o.value is not None for o in outcomes) and self.all_hold():
                return
            failed = {i for i, o in enumerate(sent) if isinstance(o.error, PeerLost | BarrierTimeout)}
            dead = {i for i, o in enumerate(sent) if isinstance(o.error, FINAL)}
            dead |= failed if failed & suspects else set()
            suspects = failed - dead
            broken = {
                rollout.engine
                for outcome, rollout in zip(taken, self.rollouts, strict=True)
                if outcome.error is not None and not isinstance(outcome.error, UpdateAborted)
            }
            await self.restart(dead, broken)
        raise AssertionError(f"no version goes through any more: {self.outcomes[-8:]}")

    def all_hold(self) -> bool:
        return all(holds(rollout, self.version) for rollout in self.rollouts)

    async def finish(self) -> None:
        """Close everything; nothing is left."""
        assert not any(hooks.is_paused for hooks in self.hooks), "a server was not resumed"
        await self._check_slots()
        for outcome in await self.close(self.adapters):
            assert outcome.error is None, outcome
        self.outcomes.clear()
        await asyncio.sleep(MOMENT_S)
        assert self.device.num_open == 0, "streams are open"
        assert self.device.num_pending == 0, "work was left in a stream"
        assert not list(self.path.iterdir()), "the rendezvous file is left"

    async def _check_slots(self) -> None:
        """No slot waits for anybody, nothing is kept for others, and only the newest version has a source."""
        engines = [e for receiver in self.receivers if (e := receiver._rollout._engine) is not None]
        relays = [e._exchange.relay for e in engines if e._exchange is not None]
        puts = [relay._puts for relay in relays]
        puts += [s._trainer._epoch.engine._puts for s in self.senders if s._trainer._epoch is not None]
        left: list[object] = []
        for _ in range(round(2 * self.config["fence_timeout_s"] / MOMENT_S)):
            left = [e._ring.states for e in engines if set(e._ring.states) != {"free"}]
            left += [relay.kept_for for relay in relays if relay.kept_for]
            left += [own._sources for own in puts if len(own._sources) > 1]
            left += [own._orders for own in puts if own._orders]
            if not left:
                return
            await asyncio.sleep(MOMENT_S)
        raise AssertionError(f"slots, or what is written from them, are left: {left}")


class Leaks:
    """What there is before a run, and must be there after it."""

    def __init__(self) -> None:
        _collect()
        self._tasks = len(asyncio.all_tasks())
        self._descriptors = _descriptors()
        self._threads = set(threading.enumerate())

    def check(self, device: TrackedDevice) -> None:
        tasks = asyncio.all_tasks()
        assert len(tasks) == self._tasks, f"tasks are left: {tasks}"
        assert set(threading.enumerate()) == self._threads, "threads are left"
        if _descriptors() != self._descriptors or device.buffers or len(loopback._REGISTRY._transports):
            _collect()
        left = _descriptors()
        assert left == self._descriptors, (
            f"descriptors are left: {dict(left.items() - self._descriptors.items())}"
        )
        assert not device.buffers, f"{len(device.buffers)} buffers are held"
        assert not len(loopback._REGISTRY._transports), "transports are registered"


def _collect() -> None:
    """Twice: tensors hold their memory where the collector cannot see it."""
    gc.collect()
    gc.collect()


def _descriptors() -> dict[str, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the listing's own
            continue
    return found


async def passes() -> None:
    """Let the loop run what is ready."""
    for _ in range(20):
        await asyncio.sleep(0)


@functools.cache
def _source_map(group: str, rank: int, size: int) -> SourceMap:
    described = Trainer(rank, size).source if group == "trainer" else Rollout(group, rank, size).target
    return discover_map(described, Config(verify="off"))


@functools.cache
def _expected(rank: int, size: int, version: int | None) -> dict[str, torch.Tensor]:
    rollout = Rollout("any", rank, size)
    return rollout.parameters if version is None else rollout.expected(version)


def holds(rollout: Rollout, version: int | None) -> bool:
    """Whether a worker's parameters are exactly those of a version; None: those it began with."""
    expected = _expected(rollout.rank, rollout.size, version)
    return all(torch.equal(tensor, rollout.parameters[name]) for name, tensor in expected.items())
