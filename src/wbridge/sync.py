"""The blocking twins: the same names as in `wbridge`, for code without an event loop.

Everything they do in the background runs in the same thread of its own as in the async adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Literal

from wbridge.config import Config, Mode
from wbridge.device.base import AnyStream, Device
from wbridge.flow.standings import EngineStatus
from wbridge.ids import Epoch
from wbridge.observe.stats import SendStats
from wbridge.session.endpoints import Source, Target
from wbridge.session.publication import Outcomes, Publication
from wbridge.session.requests import ServedRequest
from wbridge.session.rollout import Rollout
from wbridge.session.script import drive_blocking
from wbridge.session.steps import Step
from wbridge.session.trainer import Trainer
from wbridge.session.updates import Metadata, RolloutHooks, Update
from wbridge.session.verification import Verification

_WAIT_S = 3600.0
"""`updates()` asks again after this time; any value will do."""


class SenderAdapter:
    """`wbridge.SenderAdapter`, blocking. Use it as a context manager."""

    def __init__(
        self,
        source: Source,
        *,
        rendezvous: str | None = None,
        config: Config | Mapping[str, object] | None = None,
        secret: str | None = None,
        device: Device | None = None,
    ) -> None:
        self._trainer = Trainer(source, rendezvous=rendezvous, config=config, secret=secret, device=device)

    def connect(self, timeout_s: float | None = None) -> None:
        """See `wbridge.SenderAdapter.connect`."""
        drive_blocking(self._trainer.connect(timeout_s))

    def send_weights(
        self, version: int, metadata: Metadata | None = None, *, stream: AnyStream | None = None
    ) -> Delivery:
        """See `wbridge.SenderAdapter.send_weights`. An interrupt counts as a cancellation."""
        return Delivery(drive_blocking(self._trainer.send_weights(version, metadata, stream)))

    def reconfigure(
        self,
        *,
        mode: Mode | str | None = None,
        delivery: Literal["auto", "every", "latest"] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """See `wbridge.SenderAdapter.reconfigure`. An interrupt counts as a cancellation."""
        drive_blocking(self._trainer.reconfigure(mode, delivery, timeout_s))

    def verify(self) -> Verification:
        """See `wbridge.SenderAdapter.verify`. An interrupt counts as a cancellation."""
        return drive_blocking(self._trainer.verify())

    @property
    def epoch(self) -> Epoch | None:
        return self._trainer.epoch

    @property
    def engines(self) -> dict[str, EngineStatus]:
        """See `wbridge.SenderAdapter.engines`."""
        return self._trainer.standings.view()

    @property
    def last_send(self) -> SendStats | None:
        """What the last `send_weights` of this worker cost."""
        return self._trainer.last_send

    @property
    def counters(self) -> dict[str, int]:
        """Puts, bytes and messages so far, counted by the transport."""
        return self._trainer.counters

    def close(self) -> None:
        """Leave the job and free everything, within `close_timeout_s`. Idempotent."""
        drive_blocking(self._trainer.close())

    def __enter__(self) -> SenderAdapter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Delivery:
    """`wbridge.Delivery`, blocking."""

    def __init__(self, publication: Publication) -> None:
        self._publication = publication

    @property
    def version(self) -> int:
        return self._publication.version

    @property
    def ticket(self) -> int | None:
        """This attempt's number, None until all ranks have reported."""
        return self._publication.ticket

    @property
    def outcomes(self) -> Outcomes:
        """What is known now about each engine."""
        return dict(self._publication.outcomes)

    def landed(self, timeout_s: float | None = None) -> Outcomes:
        """See `wbridge.Delivery.landed`."""
        return drive_blocking(self._publication.landed_script(timeout_s))

    def applied(self, timeout_s: float | None = None) -> Outcomes:
        """See `wbridge.Delivery.applied`."""
        return drive_blocking(self._publication.applied_script(timeout_s))

    def abort(self) -> None:
        """See `wbridge.Delivery.abort`."""
        drive_blocking(self._publication.abort_script())


class ReceiverAdapter:
    """`wbridge.ReceiverAdapter`, blocking. Use it as a context manager."""

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

    def connect(self, timeout_s: float | None = None) -> None:
        """See `wbridge.ReceiverAdapter.connect`."""
        drive_blocking(self._rollout.connect(timeout_s))

    def poll_requests(self, wait_s: float | None = None, *, stream: AnyStream | None = None) -> Update | None:
        """See `wbridge.ReceiverAdapter.poll_requests`. An interrupt counts as a cancellation."""
        if self._rollout.begin_poll() or wait_s is not None:
            return drive_blocking(self._rollout.poll(wait_s, stream))
        return None

    def updates(self) -> Iterator[Update]:
        """Yield each applied update; for code without steps of its own."""
        while True:
            if update := self.poll_requests(wait_s=_WAIT_S):
                yield update

    def step(self) -> Step:
        """See `wbridge.ReceiverAdapter.step`; use it with `with`."""
        return self._rollout.step()

    def rebind(self) -> None:
        """See `wbridge.ReceiverAdapter.rebind`."""
        drive_blocking(self._rollout.rebind())

    def request(self) -> ServedRequest:
        """See `wbridge.ReceiverAdapter.request`."""
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

    def close(self) -> None:
        """Leave the job and free everything, within `close_timeout_s`. Idempotent."""
        drive_blocking(self._rollout.close())

    def __enter__(self) -> ReceiverAdapter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
