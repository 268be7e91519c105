"""Both ends of `verify()`: digests of what the trainer would send, and of what a rollout worker holds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, Protocol

import anyio
import anyio.to_thread

from wbridge.control.connection import rebuild_error
from wbridge.control.messages import (
    Digested,
    FlowMessage,
    Sums,
    TakeDigest,
    Unverifiable,
    Verified,
    Verify,
    WithdrawVerify,
)
from wbridge.control.messages import Verification as Verification  # public: the result of `verify()`
from wbridge.device.base import Device, Event
from wbridge.device.digest import Digester, Part
from wbridge.errors import BarrierTimeout, LayoutError, PeerLost, UpdateAborted, WBridgeError
from wbridge.layout.coordinates import Coordinates
from wbridge.layout.region import Strided
from wbridge.layout.source_map import ASSEMBLED, SourceMap
from wbridge.plan.types import Transfer, WorkerPlan
from wbridge.session.gate import StepGate
from wbridge.session.steps import Step
from wbridge.session.updates import Serving

Tensors = Mapping[str, Any]  # torch tensors; torch stays out of this layer

GRACE_S = 10.0
"""The coordinator is the first to say that time is up, since it knows who is missing."""


class Holdings:
    """What one worker holds in an epoch, ready to be digested; reads nothing until asked."""

    def __init__(self, plan: WorkerPlan, source_map: SourceMap, device: Device, tensors: Tensors) -> None:
        self._plan = plan
        self._map = source_map
        self._device = device
        self._tensors = tensors
        self._ended = False

    def end(self) -> None:
        """The epoch is over, and its device closes: what is read is of no use, and no more is."""
        self._ended = True

    async def digest_outgoing(self, after: Event) -> Sums:
        """Digest what this trainer would send now: each element once for each receiver's parameter element.

        Cancelled: the weights may be read a little longer.

        Raises:
            LayoutError: the plan contradicts this worker's source map.
            UpdateAborted: the epoch is over.
        """
        return await self._run(await anyio.to_thread.run_sync(lambda: list(self._outgoing())), after)

    async def digest_incoming(self) -> tuple[dict[str, int], tuple[Unverifiable, ...]]:
        """Digest the live parameters that this rollout worker is fed, and name what cannot be.

        Raises:
            UpdateAborted: the epoch is over.
        """
        parts, unverifiable = await anyio.to_thread.run_sync(self._incoming)
        return (await self._run(parts, None)).get("", {}), unverifiable

    async def _run(self, parts: list[Part], after: Event | None) -> Sums:
        self._check_lasts()
        digester = await anyio.to_thread.run_sync(Digester, parts, self._tensors)
        self._check_lasts()
        stream = self._device.open_stream("digest")
        try:
            if after is not None:
                stream.wait_event(after)
            stream.submit(digester.run)
            await stream.record().wait()
        finally:
            stream.close()
        sums = await anyio.to_thread.run_sync(digester.sums)
        self._check_lasts()
        return sums

    def _check_lasts(self) -> None:
        if self._ended:
            raise UpdateAborted(f"{self._plan.worker}: the epoch has ended before its digest; call again")

    def _outgoing(self) -> Iterator[Part]:
        coordinates = Coordinates(self._map)
        for outgoing in self._plan.outgoing:
            for t in outgoing.piece.transfers:
                if not t.target_parameter.startswith(ASSEMBLED):
                    yield _part(coordinates, str(outgoing.receiver), t, t.source_parameter, t.source)

    def _incoming(self) -> tuple[list[Part], tuple[Unverifiable, ...]]:
        coordinates = Coordinates(self._map)
        parts: list[Part] = []
        for group in self._plan.incoming:
            for piece in group.pieces:
                for t in piece.transfers:
                    if not t.target_parameter.startswith(ASSEMBLED):
                        parts.append(_part(coordinates, "", t, t.target_parameter, t.target))
        unverifiable = tuple(
            Unverifiable(
                self._plan.worker, tensor, f"the loader computes {opaque.parameter}: {opaque.operation}"
            )
            for opaque in self._map.opaque
            for tensor in opaque.tensors
        )
        return parts, unverifiable


def _part(coordinates: Coordinates, key: str, transfer: Transfer, parameter: str, elements: Strided) -> Part:
    return Part(
        key=key,
        tensor=transfer.tensor,
        parameter=parameter,
        extents=transfer.extents,
        elements=elements,
        checkpoint=coordinates.find(parameter, transfer.tensor, transfer.extents, elements),
        dtype=transfer.wire_dtype,
    )


class Verifier:
    """A trainer rank's side, for one epoch. Runs in the loop thread."""

    def __init__(self, holdings: Holdings, post: Callable[[FlowMessage], None]) -> None:
        self._holdings = holdings
        self._post = post
        self._call = 0
        self._answers: dict[int, Future[Verification]] = {}
        self._answered = anyio.Event()
        self._ended: WBridgeError | None = None

    async def verify(self, version: int | None, after: Event, timeout_s: float) -> Verification:
        """Ask, with all other ranks, what the engines hold. Cancelled: stops waiting.

        Raises:
            BarrierTimeout: ranks or rollout workers did not answer in time; `missing` names them.
            UpdateAborted, PeerLost: the epoch ended.
            ProtocolError: the ranks sent different versions last.
        """
        sums = await self._holdings.digest_outgoing(after)
        if self._ended is not None:
            raise self._ended
        self._call += 1
        call, answer = self._call, Future[Verification]()
        self._answers[call] = answer
        self._post(Verify(call, version, sums))
        try:
            with anyio.move_on_after(2 * timeout_s + GRACE_S):
                while not answer.done():
                    await self._answered.wait()
        except anyio.get_cancelled_exc_class():
            self._post(WithdrawVerify(call))
            raise
        finally:
            del self._answers[call]
        if not answer.done():
            raise BarrierTimeout("the coordinator did not answer verify(); is it gone?", ["coordinator"])
        return answer.result()

    def answer(self, verified: Verified) -> None:
        answer = self._answers.get(verified.call)
        if answer is None or answer.done():
            return  # nobody waits for it any more
        if verified.result is not None:
            answer.set_result(verified.result)
        else:
            answer.set_exception(rebuild_error(verified))
        self._wake()

    def end(self, error: WBridgeError) -> None:
        """The epoch is over: what waits fails with `error`."""
        self._ended = error
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)
        self._wake()

    def _wake(self) -> None:
        self._answered.set()
        self._answered = anyio.Event()


class Held(Protocol):
    """What a rollout worker knows of its weights."""

    gate: StepGate
    serving: Serving


class Respondent:
    """A rollout worker's side, for one epoch. Runs in the loop thread.

    It reads the parameters inside a step of its own, so no apply is under way, and one that is due
    waits until the digest is done.
    """

    def __init__(self, holdings: Holdings, held: Held, post: Callable[[FlowMessage], None]) -> None:
        self._holdings = holdings
        self._held = held
        self._post = post

    async def answer(self, take: TakeDigest) -> None:
        """Digest and answer. Cancelled: the coordinator notices that this worker is gone."""
        with contextlib.suppress(UpdateAborted, PeerLost):  # the coordinator does not wait for it any more
            async with Step(self._held.gate, lambda: None):
                digested = await self._digest(take)
            self._post(digested)

    async def _digest(self, take: TakeDigest) -> Digested:
        serving = self._held.serving
        if serving.tainted:
            return Digested(take.round, None, failed=serving.tainted, is_tainted=True)
        try:
            sums, unverifiable = await self._holdings.digest_incoming()
        except (LayoutError, RuntimeError) as exc:  # torch raises RuntimeError: a parameter was resized
            return Digested(take.round, serving.version, failed=f"{type(exc).__name__}: {exc}")
        return Digested(take.round, serving.version, sums, unverifiable)
