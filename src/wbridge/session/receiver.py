"""ReceiverAdapter: a rollout worker takes new versions between its steps."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from types import TracebackType

import anyio.lowlevel

from wbridge.config import Config
from wbridge.device.base import AnyStream, Device
from wbridge.ids import Epoch
from wbridge.session.endpoints import Target
from wbridge.session.requests import ServedRequest
from wbridge.session.rollout import Rollout
from wbridge.session.script import drive_async
from wbridge.session.steps import Step
from wbridge.session.updates import RolloutHooks, Update

_WAIT_S = 3600.0
"""`updates()` asks again after this time; any value will do."""


class ReceiverAdapter:
    """One rollout worker's end of the bridge. Use it as an async context manager.

    All workers of an engine call `poll_requests` the same number of times, once per step. `rendezvous`,
    `config` and `secret` are as for `SenderAdapter`.
    """

    def __init__(
        self,
        target: Target,
        *,
        rendezvous: str | None = None,
        config: Config | Mapping[str, object] | None = None,
        hooks: RolloutHooks | None = None,
        secret: str | None = None,
        device: Device | None = None,
    ) -> None:
        self._rollout = Rollout(
            target, rendezvous=rendezvous, config=config, hooks=hooks, secret=secret, device=device
        )

    async def connect(self, timeout_s: float | None = None) -> None:
        """Meet the other workers and agree on a plan. Cancelled: as if closed.

        Raises:
            BarrierTimeout: workers did not come in time; `missing` names them.
            ConfigError: this worker's settings contradict the coordinator's.
            LayoutError: trainers and rollouts do not fit together; names the tensor.
            AuthenticationError: this worker's secret is not the coordinator's.
        """
        await drive_async(self._rollout.connect(timeout_s))

    async def poll_requests(
        self, wait_s: float | None = None, *, stream: AnyStream | None = None
    ) -> Update | None:
        """Apply a new version if the engine agreed to do so at this poll; else return None at once.

        With `wait_s` it sleeps until an update is applied, at most that long. `stream`, such as a
        `torch.cuda.Stream`, is where the weights are read outside of steps; None means the caller's current
        one. What steps read is waited for wherever they ran.

        Cancelled while parked: asks the engine to let go and stays until it has answered; if the update
        was already decided, it is applied first and the cancellation raised after it.

        Raises:
            PeerLost: another worker of this engine is gone.
            ProtocolError: the workers' polls are more than `max_poll_skew` apart, or this one is made
                inside a step, which it would wait for, or while another one has not returned.
            LayoutError: a live parameter has been replaced or moved.
        """
        if self._rollout.begin_poll() or wait_s is not None:
            return await drive_async(self._rollout.poll(wait_s, stream))
        if self._rollout.pacing.is_due_for_yield():
            await anyio.lowlevel.checkpoint()
        return None

    async def updates(self) -> AsyncIterator[Update]:
        """Yield each applied update; for code without steps of its own."""
        while True:
            if update := await self.poll_requests(wait_s=_WAIT_S):
                yield update

    def step(self) -> Step:
        """Mark a forward pass: `with receiver.step() as version:`, or `async with` in async servers.

        An update waits for open steps, and on a GPU for what they have submitted to the stream that is
        current when they end, in whichever thread. A step waits while parameters are written: `async with`
        leaves the loop free meanwhile, `with` blocks the thread. A step inside another one begins at once.
        `version` is None before the first update.

        Raises:
            UpdateAborted: the weights are tainted by a failed update; poll until a whole version lands.
        """
        return self._rollout.step()

    async def rebind(self) -> None:
        """Take the parameters where they are now, after their memory was released or they were replaced.

        For sleep modes and reloads: each worker of the engine calls it between two polls, when the memory is
        back. From then on the weights count as tainted, since nobody knows what is in them: `version` is
        None and `step()` raises until a whole version has been applied. A mapping of parameters that looks
        them up in the model shows replaced ones; a dict has to be updated first.

        Raises:
            LayoutError: a parameter is gone, or has another shape, dtype or strides; names it.
            ConfigError: they moved, and trainers of this host write straight into them.
            ProtocolError: called inside a step, which it would wait for.
        """
        await drive_async(self._rollout.rebind())

    def request(self) -> ServedRequest:
        """Begin a request that knows its versions: the one it begins with, and which computed what of it."""
        return ServedRequest(self._rollout)

    @property
    def version(self) -> int | None:
        """The version of the live weights; None before the first commit, and while they are tainted."""
        return self._rollout.serving.version

    @property
    def epoch(self) -> Epoch | None:
        return self._rollout.epoch

    @property
    def counters(self) -> dict[str, int]:
        """Puts, bytes and messages so far, counted by the transport: what this worker passes on to others.

        `received_nbytes`: what it has got itself, from trainers and other rollouts.
        """
        return self._rollout.counters

    async def aclose(self) -> None:
        """Leave the job and free everything, within `close_timeout_s`. Idempotent."""
        await drive_async(self._rollout.close())

    async def __aenter__(self) -> ReceiverAdapter:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
