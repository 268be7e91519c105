"""Trainer: the sending worker between its caller and the loop thread."""

from __future__ import annotations

import contextlib
import functools
import operator
import time
from collections.abc import Mapping

import anyio
import anyio.abc
import anyio.to_thread
import msgspec

from wbridge.config import Config, Mode
from wbridge.control.agreement import adopt
from wbridge.control.messages import Committed, EpochStart, FlowMessage, Value
from wbridge.device.base import AnyStream, Device, Event
from wbridge.discovery.pointers import Bindings, bind
from wbridge.engine.wire import DataFrame
from wbridge.errors import BarrierTimeout, ConfigError, PeerLost, UpdateAborted, WBridgeError
from wbridge.flow.messages import Credit, Placed
from wbridge.flow.standings import Standings
from wbridge.ids import Epoch, WorkerId
from wbridge.observe.stats import SendStats
from wbridge.plan.types import WorkerPlan
from wbridge.session.contexts import open_sender_context
from wbridge.session.endpoints import Source, described_by
from wbridge.session.member import Addresses
from wbridge.session.portal import Call
from wbridge.session.publication import Publication
from wbridge.session.script import Script, Wait
from wbridge.session.sending import SendingEpoch
from wbridge.session.updates import MAX_METADATA_NBYTES, Metadata
from wbridge.session.verification import Verification
from wbridge.session.worker import Worker, load_job

NUM_CHECKED = 512
"""Of so many tensors a send looks whether they are where they were; the next one goes on with others."""


class Trainer:
    """Publishes versions. Public methods are scripts; the rest runs in the loop thread."""

    def __init__(
        self,
        source: Source,
        *,
        rendezvous: str | None,
        config: Config | Mapping[str, object] | None,
        secret: str | None,
        device: Device | None,
    ) -> None:
        job = load_job(described_by(source, Source), rendezvous, config, secret)
        self._source = source
        self._worker = Worker(job, device)
        self._config = job.config
        self._tasks: anyio.abc.TaskGroup | None = None
        self._epoch: SendingEpoch | None = None
        self._live = anyio.Event()
        self._ended: WBridgeError | None = None
        self._bindings: Bindings | None = None
        self._last_version: int | None = None
        self.last_send: SendStats | None = None
        self.standings: Standings = Standings()

    # The caller's side ---------------------------------------------------------------------------------

    def connect(self, timeout_s: float | None) -> Script[None]:
        return self._worker.connect(self, self._source, timeout_s)

    def send_weights(
        self, version: int, metadata: Metadata | None, stream: AnyStream | None
    ) -> Script[Publication]:
        version = checked_version(version)
        packed = pack_metadata(metadata)
        begun_s = time.perf_counter()
        after = self._worker.stream_of_caller(stream).record()
        call: Call[Publication] = Call()
        self._worker.loop.call(functools.partial(self._begin_send, call, version, packed, after))
        publication: Publication = yield Wait(call.finished, lambda: self._worker.loop.cancel(call))
        self.last_send = SendStats(time.perf_counter() - begun_s, self.standings.lag)
        return publication

    def verify(self) -> Script[Verification]:
        after = self._worker.stream_of_caller().record()
        call = self._worker.loop.submit(functools.partial(self._verify, after))
        found: Verification = yield Wait(call.finished, lambda: self._worker.loop.cancel(call))
        return found

    def reconfigure(
        self, mode: Mode | str | None, delivery: str | None, timeout_s: float | None
    ) -> Script[None]:
        values = {"mode": mode.value if isinstance(mode, Mode) else mode, "delivery": delivery}
        asked: dict[str, Value] = {name: value for name, value in values.items() if value is not None}
        if not asked:
            raise ConfigError("reconfigure() without mode or delivery: say what is to change")
        try:
            adopt(self._config, asked)
        except ConfigError as exc:
            raise ConfigError(f"reconfigure() with values that do not exist: {exc.__cause__}") from exc
        patience_s = timeout_s or self._config.connect_timeout_s
        call = self._worker.loop.submit(functools.partial(self._reconfigure, asked, patience_s))
        yield Wait(call.finished, lambda: self._worker.loop.cancel(call))

    def close(self) -> Script[None]:
        return self._worker.close()

    @property
    def epoch(self) -> Epoch | None:
        return self._epoch.context.epoch if self._epoch is not None else None

    @property
    def counters(self) -> dict[str, int]:
        return self._worker.counters

    # The loop thread: `Role` -----------------------------------------------------------------------------

    def _begin_send(self, call: Call[Publication], version: int, metadata: bytes, after: Event) -> None:
        """Send without a task of its own, where all that is to be waited for is the end of the transfer."""
        epoch, publication = self._epoch, None
        if self._live.is_set() and epoch is not None:
            try:
                publication = epoch.begin(version, metadata, after)
            except Exception as exc:  # reported to the caller's thread, which raises it
                call.finished.set_exception(exc)
                return
        if epoch is None or publication is None:
            self._worker.loop.begin(call, functools.partial(self._send, version, metadata, after))
            return
        publication.then = functools.partial(self._end_send, call, epoch, publication)
        call.on_cancel = functools.partial(self._cancel_send, call, epoch, publication)

    def _end_send(self, call: Call[Publication], epoch: SendingEpoch, publication: Publication) -> None:
        error = publication.error
        if error is None:
            self._last_version = publication.version
            call.finished.set_result(publication)
        else:
            if isinstance(error, BarrierTimeout):
                self._note_partial(epoch, publication.version)
            call.finished.set_exception(error)

    def _cancel_send(self, call: Call[Publication], epoch: SendingEpoch, publication: Publication) -> None:
        async def withdraw() -> Publication:
            with anyio.CancelScope(shield=True):
                await epoch.withdraw(publication)
            raise UpdateAborted(f"version {publication.version}: its send was cancelled")

        call.on_cancel = publication.then = None
        self._worker.loop.begin(call, withdraw)

    async def _send(self, version: int, metadata: bytes, after: Event) -> Publication:
        epoch = await self._live_epoch(f"version {version}")
        try:
            publication = await epoch.send(version, metadata, after)
        except BarrierTimeout:
            self._note_partial(epoch, version)
            raise
        self._last_version = version
        return publication

    def _note_partial(self, epoch: SendingEpoch, version: int) -> None:
        if epoch.announced == version:  # engines that took it in time have it
            self._last_version = version

    async def _reconfigure(self, values: dict[str, Value], patience_s: float) -> None:
        if self._ended is not None:
            raise self._ended
        await self._worker.reconfigure(values, patience_s)

    async def _verify(self, after: Event) -> Verification:
        epoch = await self._live_epoch("verify()")
        return await epoch.verifier.verify(self._last_version, after, self._config.update_timeout_s)

    async def _live_epoch(self, what: str) -> SendingEpoch:
        """Wait for a live epoch, at most `coordinator_timeout_s`."""
        timeout_s = self._config.coordinator_timeout_s
        if not self._live.is_set():  # else a cancelled call begins all the same, and is then withdrawn
            with anyio.move_on_after(timeout_s):
                await self._live.wait()
        if self._ended is not None:
            raise self._ended
        if self._epoch is None or not self._live.is_set():
            raise PeerLost(
                f"{self._source.worker}: {what}: no epoch is live after {timeout_s:g} s"
                " (coordinator_timeout_s); is the coordinator, or another trainer rank, gone?"
            )
        return self._epoch

    async def open(self, config: Config, secret: bytes, tasks: anyio.abc.TaskGroup, host: str) -> Addresses:
        self._config = config
        self._tasks = tasks
        return Addresses(await self._worker.open_transports(config, tasks, self._frame))

    @property
    def committed(self) -> Committed | None:
        return None

    async def start_epoch(self, start: EpochStart, plan: WorkerPlan, config: Config) -> None:
        self._config = config
        self.standings.enter(start.standings)
        await self._end_epoch(UpdateAborted("members or settings have changed; send the version again"))
        bindings = self._bindings = await anyio.to_thread.run_sync(self._bind)
        device = self._worker.open_epoch_device()
        context = await open_sender_context(
            start,
            plan,
            config,
            transport=self._worker.transports,
            device=device,
            tensors=self._source.parameters,
        )
        self._epoch = SendingEpoch(
            context,
            start.engines,
            number_call=self._worker.number_call,
            check_source=functools.partial(bindings.check_some, NUM_CHECKED),
            holdings=self._worker.holdings(plan, self._source.parameters),
            post=self._post,
            submit=lambda work: self._worker.loop.submit(work).finished,
        )
        assert self._tasks is not None
        self._worker.run_epoch(self._tasks, self._epoch.engine.run)

    def _bind(self) -> Bindings:
        """Remember where the weights lie that this epoch will read."""
        if self._bindings is not None:
            return self._bindings.bind_again()
        source_map = self._worker.source_map
        assert source_map is not None, "an epoch starts before the weights are described"
        return bind(self._source.parameters, names=source_map.parameters)

    def epoch_live(self, epoch: Epoch) -> None:
        self._live.set()

    def receive(self, message: FlowMessage) -> None:
        self.standings.note(message)
        if self._epoch is not None:
            self._epoch.receive(message)

    def worker_lost(self, worker: WorkerId, reason: str) -> None:
        if worker.role == "rollout":
            self.standings.lose(worker.group)
        if self._epoch is not None and worker.role == "rollout":
            self._epoch.engine.lose_receiver(str(worker))

    def coordinator_lost(self, reason: str) -> None:
        self._not_live()
        assert self._tasks is not None
        self._tasks.start_soon(self._give_up, self._epoch, reason)

    async def _give_up(self, epoch: SendingEpoch | None, reason: str) -> None:
        """What waits for a coordinator that stays away fails after its deadline."""
        with anyio.move_on_after(self._config.coordinator_timeout_s):
            await anyio.sleep_forever()
        if epoch is self._epoch and not self._live.is_set():
            await self._end_epoch(PeerLost(f"{self._source.worker}: {reason}; connect again"))

    async def stop(self) -> None:
        self._not_live()
        await self._worker.stop_epoch()

    def end(self, error: WBridgeError) -> None:
        self._ended = error
        epoch, self._epoch = self._epoch, None
        if epoch is not None:
            epoch.end(error)
        self._live.set()

    async def _end_epoch(self, error: WBridgeError) -> None:
        """Stop reading the weights, then fail what is unfinished."""
        epoch, self._epoch = self._epoch, None
        self._not_live()
        try:
            await self._worker.stop_epoch()
        finally:  # nobody else knows the calls of this epoch, which have no tasks that end with the loop
            if epoch is not None:
                epoch.end(error)

    def _not_live(self) -> None:
        if self._live.is_set():  # else somebody may wait for this very event
            self._live = anyio.Event()

    def _post(self, message: FlowMessage) -> None:
        """Without a coordinator the epoch ends soon, and what waits for an answer with it."""
        with contextlib.suppress(PeerLost):
            self._worker.post(message)

    def _frame(self, peer: str, frame: DataFrame) -> None:
        if self._epoch is None or frame.epoch != self._epoch.context.epoch:
            return
        match frame.message:
            case Credit():
                self._epoch.engine.credit(peer, frame.message)
            case Placed():
                self._epoch.engine.placed(peer, frame.message)


def checked_version(version: object) -> int:
    """Return the label of a version as the integer that travels; numpy's and torch's integers are ones too.

    Raises:
        ConfigError: it is no integer, or one of more than 64 bits.
    """
    try:
        number = operator.index(version)  # type: ignore[arg-type]  # what a caller gives is to be found out
    except TypeError as exc:
        raise ConfigError(
            f"version {version!r} is a {type(version).__name__}; give an integer, such as the training step"
        ) from exc
    if not -(2**63) <= number < 2**64:
        raise ConfigError(f"version {number} does not fit into 64 bits; number the training steps, say")
    return number


def pack_metadata(metadata: Metadata | None) -> bytes:
    """Encode the application's metadata.

    Raises:
        ConfigError: it is not msgpack-able, or larger than 64 KiB.
    """
    if metadata is None:
        return b""
    try:
        packed = msgspec.msgpack.encode(dict(metadata))
    except (TypeError, ValueError, OverflowError) as exc:
        raise ConfigError(f"metadata cannot be sent: {exc}; use numbers, texts, lists and mappings") from exc
    if len(packed) > MAX_METADATA_NBYTES:
        raise ConfigError(f"metadata takes {len(packed)} bytes, at most {MAX_METADATA_NBYTES} can be sent")
    return packed
