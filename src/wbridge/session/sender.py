"""SenderAdapter: a trainer worker publishes versions of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Literal

from wbridge.config import Config, Mode
from wbridge.device.base import AnyStream, Device
from wbridge.flow.standings import EngineStatus
from wbridge.ids import Epoch
from wbridge.observe.stats import SendStats
from wbridge.session.endpoints import Source
from wbridge.session.publication import Outcomes, Publication
from wbridge.session.script import drive_async
from wbridge.session.trainer import Trainer
from wbridge.session.updates import Metadata
from wbridge.session.verification import Verification


class SenderAdapter:
    """One trainer worker's end of the bridge. Use it as an async context manager.

    Everything it does in the background runs in a thread of its own, so transfers go on while the
    caller computes. `rendezvous` is `tcp://host:port`, `file:///path` or, if not given, `env://`: where
    torchrun says. `secret` wins over WBRIDGE_SECRET. Rank 0 runs the coordinator unless
    `config.coordinator` says `external`.
    """

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

    async def connect(self, timeout_s: float | None = None) -> None:
        """Meet the other workers and agree on a plan. Cancelled: as if closed.

        Raises:
            BarrierTimeout: workers did not come in time; `missing` names them.
            ConfigError: this worker's settings contradict the coordinator's.
            LayoutError: trainers and rollouts do not fit together; names the tensor.
            AuthenticationError: this worker's secret is not the coordinator's.
        """
        await drive_async(self._trainer.connect(timeout_s))

    async def send_weights(
        self, version: int, metadata: Metadata | None = None, *, stream: AnyStream | None = None
    ) -> Delivery:
        """Publish the weights as they are now, labelled `version`; every trainer rank calls it.

        Returns when the weights may change again: with direct staging when every served engine has
        landed them, with pinned staging when the snapshot is taken. `metadata`, a msgpack-able mapping
        of at most 64 KiB, travels from rank 0. `stream`, such as a `torch.cuda.Stream`, is where the weights
        were last written; None means the caller's current one.

        Cancelled: before all ranks have called, withdraws this call for all of them; afterwards aborts
        the version with direct staging, and only stops waiting with pinned staging.

        Raises:
            ConfigError: `version` is no integer of 64 bits, or `metadata` cannot be sent.
            LayoutError: parameters are not where they were; names them.
            UpdateAborted: a rank withdrew, the version was aborted, or the membership changed.
            BarrierTimeout: within `update_timeout_s`, engines did not take it (with `every`), or trainer
                ranks did not make this call; `missing` names them.
            ProtocolError: ranks sent different versions.
            PeerLost: a trainer rank or the coordinator is gone.
        """
        return Delivery(await drive_async(self._trainer.send_weights(version, metadata, stream)))

    async def reconfigure(
        self,
        *,
        mode: Mode | str | None = None,
        delivery: Literal["auto", "every", "latest"] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Change how the job moves versions, between two of them; every trainer rank calls it.

        Versions that are on their way arrive first; then all workers go into a new epoch, with the same
        plan. Returns when it is live. So it does with the values that the job has: after a trainer has moved
        or replaced its parameters, the new epoch takes them where they are. `timeout_s` is how long to wait
        for the other ranks' calls, and for an engine if there is none, by default `connect_timeout_s`.

        Cancelled: before all ranks have called, withdraws the change for all of them; afterwards only
        stops waiting.

        Raises:
            ConfigError: there is no such value, or a rollout worker has set another one for itself.
            ProtocolError: ranks ask for different values.
            BarrierTimeout: ranks did not call in time, or no engine came; `missing` names them.
            UpdateAborted: a rank withdrew, or the settings are being changed already.
            PeerLost: a trainer rank or the coordinator is gone, before the call or during it.
        """
        await drive_async(self._trainer.reconfigure(mode, delivery, timeout_s))

    async def verify(self) -> Verification:
        """Compare what every engine holds with the weights as they are now; every trainer rank calls it.

        Digests travel, no weights. An engine's parameters are read between two applies; steps go on
        meanwhile. Call it before the weights change again. An engine at another version than the last one
        sent is reported with its own, a dead one as lost. Takes up to `update_timeout_s` for the
        other ranks to call, and as long again for the engines.

        Cancelled: this rank no longer asks, and has to call again for the others to get an answer, unless
        all have called. The weights may be read a little longer.

        Raises:
            BarrierTimeout: ranks or rollout workers did not answer in time; `missing` names them.
            UpdateAborted: members or settings changed meanwhile.
            ProtocolError: the ranks sent different versions last.
            PeerLost: a trainer rank or the coordinator is gone.
        """
        return await drive_async(self._trainer.verify())

    @property
    def epoch(self) -> Epoch | None:
        return self._trainer.epoch

    @property
    def engines(self) -> dict[str, EngineStatus]:
        """What each engine of the epoch has: its version, how far that lags, and whether it can serve.

        Known from the outcomes that arrive anyway; asking sends nothing. `wbridge status` says the same.
        """
        return self._trainer.standings.view()

    @property
    def last_send(self) -> SendStats | None:
        """What the last `send_weights` of this worker cost."""
        return self._trainer.last_send

    @property
    def counters(self) -> dict[str, int]:
        """Puts, bytes and messages so far, counted by the transport."""
        return self._trainer.counters

    async def aclose(self) -> None:
        """Leave the job and free everything, within `close_timeout_s`. Idempotent."""
        await drive_async(self._trainer.close())

    async def __aenter__(self) -> SenderAdapter:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class Delivery:
    """One published version on its way to the engines."""

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

    async def landed(self, timeout_s: float | None = None) -> Outcomes:
        """Return when no engine is being written any more, with what is known of each engine then.

        Never waits for a dead or skipped engine. None waits for as long as the others take. Cancelled: only
        stops waiting.

        Raises:
            UpdateAborted: this version was aborted.
            BarrierTimeout: `timeout_s` has passed; `missing` names the engines. Nothing has changed by that.
        """
        return await drive_async(self._publication.landed_script(timeout_s))

    async def applied(self, timeout_s: float | None = None) -> Outcomes:
        """Return when each engine has a final outcome. Otherwise as `landed`."""
        return await drive_async(self._publication.applied_script(timeout_s))

    async def abort(self) -> None:
        """End this version everywhere; engines that have applied it keep it. Idempotent.

        When it returns, no engine applies the version any more: each has answered, or is lost.
        """
        await drive_async(self._publication.abort_script())
