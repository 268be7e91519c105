"""Publication: one version on its way, shared by the loop thread that drives it and the caller who asks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Literal

from wbridge.device.wakeup import Latch
from wbridge.errors import BarrierTimeout, WBridgeError
from wbridge.flow.messages import EngineOutcome, Outcome
from wbridge.session.script import Script, Wait
from wbridge.staging.base import Source

Outcomes = dict[str, Outcome | Literal["landed"]]
"""What became of a version on each engine; `landed` until it is committed."""


class Publication:
    """One call of `send_weights`. All methods but the scripts run in the loop thread."""

    def __init__(
        self, call: int, version: int, engines: tuple[str, ...], abort: Callable[[Publication], Future[None]]
    ) -> None:
        self.call = call
        self.version = version
        self.ticket: int | None = None
        self.source: Source | None = None
        self.outcomes: Outcomes = {}
        self.error: WBridgeError | None = None
        """Why it ended everywhere, or why the send that waits for it must raise."""
        self.answered: Latch = Latch()
        """The call has got a ticket, or never will: what a cancelled one waits for."""
        self.released: Latch = Latch()
        """The weights may change again, or the send must raise `error`."""
        self.over: Latch = Latch()
        """It is released, and no engine will do anything more with it."""
        self.then: Callable[[], None] | None = None
        """Called when it is released."""
        self._open = set(engines)
        self._unsettled = set(engines)
        self._unlanded = set(engines)
        self._abort: Callable[[Publication], Future[None]] | None = abort
        self._landed: Future[None] = Future()
        self._applied: Future[None] = Future()

    def note(self, outcome: EngineOutcome) -> None:
        """Record what an engine did; the first final outcome of an engine stays."""
        if outcome.engine not in self._open:
            return
        self.outcomes[outcome.engine] = outcome.outcome
        self._unlanded.discard(outcome.engine)
        if outcome.final:
            self._open.remove(outcome.engine)
        if outcome.outcome == "landed":
            self._unsettled.add(outcome.engine)
        else:  # `missed` too: nobody waits for an engine that was skipped
            self._unsettled.discard(outcome.engine)
        if not self._unlanded:
            _resolve(self._landed, None)
        if not self._unsettled:
            _resolve(self._applied, None)

    @property
    def is_over(self) -> bool:
        """No outcome is outstanding."""
        return not self._open

    def retire(self) -> None:
        """No engine is being written any more."""
        _resolve(self._landed, None)

    def fail(self, error: WBridgeError) -> None:
        """The version ended everywhere. Those that wait now or later get `error`."""
        self.error = self.error or error
        self.answered.set()
        _resolve(self._landed, error)
        _resolve(self._applied, error)

    def release(self) -> None:
        self.released.set()
        then, self.then = self.then, None
        if then is not None:
            then()

    def let_go(self) -> None:
        """All is over: hold nothing of the epoch, since the caller may keep this for as long as it likes."""
        self.over.set()
        self.source = self._abort = None

    def landed_script(self, timeout_s: float | None) -> Script[Outcomes]:
        return (yield from self._wait(self._landed, self._unlanded, timeout_s))

    def applied_script(self, timeout_s: float | None) -> Script[Outcomes]:
        return (yield from self._wait(self._applied, self._unsettled, timeout_s))

    def _wait(self, done: Future[None], missing: set[str], timeout_s: float | None) -> Script[Outcomes]:
        try:
            yield Wait(done, timeout_s=timeout_s)
        except TimeoutError as exc:
            if not done.done():
                names = sorted(missing)
                text = f"version {self.version} has no outcome on {', '.join(names)} after {timeout_s:g} s"
                raise BarrierTimeout(f"{text}; poll more often there, or wait longer", names) from exc
            done.result()  # it has ended just now, or with an error of that kind
        return dict(self.outcomes)

    def abort_script(self) -> Script[None]:
        """Return when no engine is being written any more, or will be, whatever became of the version."""
        abort = self._abort
        if abort is not None:
            yield Wait(abort(self))


def _resolve(future: Future[None], error: WBridgeError | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
