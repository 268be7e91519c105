"""Incoming: the receiving side of one ucxx connection."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from wbridge.errors import ProtocolError
from wbridge.transport.base import Message
from wbridge.transport.exposures import Exposures
from wbridge.transport.inbox import Inbox
from wbridge.transport.ucx_frames import (
    Begin,
    Bye,
    Drop,
    End,
    Flush,
    Flushed,
    Forget,
    Frame,
    Gone,
    Hello,
    Region,
    Revoke,
    Revoked,
    Small,
    Taken,
    Text,
    Welcome,
    data_tag,
)
from wbridge.transport.ucx_grants import Grant, Grants, Registered, decode_grant
from wbridge.transport.ucx_transfer import Transfer, Worker

WINDOW: Final = 128
"""Messages that one connection may have unread at the receiver: the bound of its back-pressure."""

_logger = logging.getLogger(__name__)


class Incoming:
    """Puts bytes where they were exposed and messages into the inbox; never waits."""

    def __init__(
        self,
        hello: Hello,
        *,
        worker: Worker,
        send: Callable[[Frame], None],
        inbox: Inbox,
        exposures: Exposures,
        landed: Callable[[Grant], None],
        forget: Callable[[], None],
    ) -> None:
        """`landed` is called with each grant whose bytes are in place, before anybody hears of it."""
        self.hello = hello
        self._worker = worker
        self._send = send
        self._inbox = inbox
        self._exposures = exposures
        self._landed = landed
        self._forget = forget
        self._puts: dict[bytes, _Arrival] = {}
        self._arrivals: deque[_Arrival] = deque()
        self._flushes: list[tuple[int, set[bytes]]] = []
        self._num_taken = 0
        self._closed = False
        self.grants: Grants = Grants(
            hello.connection, lambda token: self._reply(Revoke(hello.connection, token))
        )

    @property
    def is_open(self) -> bool:
        return not self._closed

    def welcome(self, regions: Iterable[Registered]) -> None:
        """Accept the connection, which may be granted slots in these regions."""
        for region in regions:
            self.show(region)
        self._send(Welcome(self.hello.connection, WINDOW))

    def show(self, region: Registered) -> None:
        self._reply(Region(self.hello.connection, region.number, region.address, region.nbytes, region.key))

    def hide(self, region: int) -> None:
        self._reply(Forget(self.hello.connection, region))

    def on_frame(self, frame: Frame) -> None:
        match frame:
            case Text():
                self._arrive(_Arrival(frame.payload))
            case Small():
                self._on_small(frame)
            case Begin():
                self._on_begin(frame)
            case End() if (grant := decode_grant(frame.token)) is not None:
                self._landed(grant)
                self._arrive(_Arrival(frame.notify, dropped=not self.grants.settle(grant)))
                self._forget_if_idle()
            case Revoked() if (grant := decode_grant(frame.token)) is not None:
                self.grants.settle(grant)
                self._forget_if_idle()
            case End():
                if (landing := self._puts.get(frame.token)) is not None:
                    landing.notify, landing.over = frame.notify, True
                    self._forget_if_over(frame.token, landing)
                    self._arrive(landing)
            case Drop():
                if (landing := self._puts.get(frame.token)) is not None:
                    landing.dropped = landing.over = True
                    self._forget_if_over(frame.token, landing)
            case Flush():
                self._flushes.append((frame.number, self._running()))
                self._answer_flushes()
            case Bye():
                self._closed = True
                if frame.is_still:
                    self.grants.end()
                self._forget_if_idle()
            case _:
                raise ProtocolError(f"{self.hello.name} sent {type(frame).__name__} to a receiver")

    def die(self) -> None:
        """The sender's process is dead: once what it has sent is handled, nothing of it is written."""
        self._worker.drive()
        self.grants.end()
        self.end()

    def end(self) -> None:
        """Nothing is received any more. What was granted is written, if its sender has not said otherwise."""
        self._closed = True
        for token in self._running():
            self._exposures.finish(token)
        self.grants.doubt()
        self._forget()

    def lose(self) -> None:
        """The sender is out of reach: what it was writing it may write still."""
        self._closed = True
        for token in self._running():
            self._exposures.doubt(token)
        self.grants.doubt()
        self._forget()

    def close(self) -> None:
        """Tell the sender that nothing is received any more."""
        if not self._closed:
            self._closed = True
            self._send(Gone(self.hello.connection))

    def _forget_if_idle(self) -> None:
        """A closed connection is still watched while bytes of it are on their way."""
        if self._closed and not self._running() and not self.grants.num_open:
            self._forget()

    def _running(self) -> set[bytes]:
        return {token for token, landing in self._puts.items() if not landing.stopped}

    def _on_small(self, frame: Small) -> None:
        memory = self._begin(frame.token, len(frame.data))
        if memory is not None:
            memory[:] = frame.data
            self._exposures.finish(frame.token)
        self._arrive(_Arrival(frame.notify, dropped=memory is None))

    def _on_begin(self, frame: Begin) -> None:
        """Receive the bytes, into nowhere if the slot was withdrawn: the sender must not wait for ever.

        The receive is posted here and not when the slot is exposed, because the bindings cannot
        cancel a posted receive, and then no slot could be taken back.
        """
        memory = self._begin(frame.token, frame.nbytes)
        landing = _Arrival(None, stopped=False, dropped=memory is None)
        self._puts[frame.token] = landing
        where = memoryview(bytearray(frame.nbytes)) if memory is None else memory

        def stopped(transfer: Transfer) -> None:
            landing.stopped = True
            landing.dropped = landing.dropped or transfer.error is not None
            if memory is not None:
                self._exposures.finish(frame.token)
            self._forget_if_over(frame.token, landing)
            self._deliver()
            self._answer_flushes()
            self._forget_if_idle()

        self._worker.receive(where, data_tag(frame.token), stopped)

    def _begin(self, token: bytes, nbytes: int) -> memoryview | None:
        try:
            return self._exposures.begin(token, nbytes)
        except ProtocolError as exc:
            _logger.warning("put refused", extra={"peer": self.hello.name, "reason": str(exc)})
            return None

    def _forget_if_over(self, token: bytes, landing: _Arrival) -> None:
        if landing.stopped and landing.over:
            self._puts.pop(token, None)

    def _answer_flushes(self) -> None:
        for number, running in list(self._flushes):
            running.difference_update([t for t in running if t not in self._puts or self._puts[t].stopped])
            if not running:
                self._flushes.remove((number, running))
                self._reply(Flushed(self.hello.connection, number))

    def _arrive(self, arrival: _Arrival) -> None:
        self._arrivals.append(arrival)
        self._deliver()

    def _deliver(self) -> None:
        """Pass on what is complete, in the order of sending: a put's bytes may come after its `End`."""
        while self._arrivals and self._arrivals[0].stopped:
            arrival = self._arrivals.popleft()
            if arrival.dropped or arrival.notify is None:
                self._take()
            else:
                self._inbox.post(Message(self.hello.name, arrival.notify), self._take)

    def _take(self) -> None:
        """Give the sender room again, in batches."""
        self._num_taken += 1
        if self._num_taken >= WINDOW // 2:
            count, self._num_taken = self._num_taken, 0
            self._reply(Taken(self.hello.connection, count))

    def _reply(self, frame: Frame) -> None:
        if not self._closed:
            self._send(frame)


class _Arrival:
    """A message, or a put whose bytes may still be on their way."""

    def __init__(self, notify: bytes | None, *, stopped: bool = True, dropped: bool = False) -> None:
        self.notify = notify
        self.stopped = stopped
        self.dropped = dropped
        self.over = False
