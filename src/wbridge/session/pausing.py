"""Pausing: what the caller's side does around an apply: its hooks, and the steps that are open."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from wbridge.errors import EndpointClosed
from wbridge.session.gate import StepGate
from wbridge.session.portal import Loop
from wbridge.session.script import Run, Script, Wait, first_done
from wbridge.session.updates import RolloutHooks, Update


class Pausing:
    """The hooks of one worker, always run in pairs, and its gate for steps."""

    def __init__(self, hooks: RolloutHooks | None) -> None:
        self.gate: StepGate = StepGate()
        self._hooks = hooks
        self._has_begun = False

    def begin_poll(self) -> None:
        self._has_begun = False

    def get_ready(self, check: Callable[[], None], poller: int) -> bool:
        """Make sure, for the poll in thread `poller`, that this worker can be written; until `end` no step
        begins. False: hooks or steps are in the way, or `check` fails, of which `before` says why."""
        if self._hooks is not None or not self.gate.close_if_free(poller):
            return False
        try:
            check()
        except Exception:  # raised again by `before`
            self.gate.open()
            return False
        return True

    def before(self, check: Callable[[], None]) -> Script[BaseException | None]:
        """Make sure that this worker can be written, and run `before_apply`; what fails is why to refuse."""
        try:
            check()
            if self._hooks is not None:
                self._has_begun = True
                yield Run(self._hooks.before_apply)
        except GeneratorExit:
            raise
        except BaseException as exc:  # a cancelled hook too: the engine is told, and the poll raises it
            return exc
        return None

    def drain(
        self, loop: Loop, wait_let_go: Callable[[], Awaitable[None]], on_cancel: Callable[[], None]
    ) -> Script[bool]:
        """Wait until no step is open; False if the engine lets this worker go first: `wait_let_go`."""
        while (drained := self.gate.try_close()) is not None:
            try:
                let_go = loop.submit(wait_let_go)
            except EndpointClosed:  # the adapter was closed meanwhile
                return False
            yield Wait(first_done(drained, let_go.finished), on_cancel)
            if not drained.done():
                return False
            loop.cancel(let_go)
        return True

    def finish(self, finish: Callable[..., None], *args: object) -> Script[str]:
        """Let the backend do its part in the caller's context; return why it failed."""
        try:
            yield Run(finish, *args)
        except GeneratorExit:
            raise
        except BaseException as exc:  # an interrupt too: the engine is tainted, and the poll raises it
            return f"{type(exc).__name__}: {exc}"
        return ""

    def end(self, update: Update | None, error: BaseException | None = None) -> Script[None]:
        """Let steps begin, run `after_apply` if `before_apply` has run, and raise what ended the poll."""
        self.gate.open()
        if self._has_begun and self._hooks is not None:
            try:
                yield Run(self._hooks.after_apply, update)
            except GeneratorExit:
                raise
            except BaseException as exc:  # raised at once, the earlier error as its cause
                if error is None:
                    raise
                raise exc from error
        if error is not None:
            raise error
