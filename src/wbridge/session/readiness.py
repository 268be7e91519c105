"""Readiness: the loop thread's part of a poll, which it answers for where nothing is needed of the caller."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from concurrent.futures import Future

import anyio.abc

from wbridge.device.base import Event, Stream
from wbridge.engine.lockstep import Instruction, Lockstep
from wbridge.flow.actions import RunBeforeApply
from wbridge.observe.stats import UpdateClock
from wbridge.session.pausing import Pausing


class Readiness:
    """Hands polls to the lockstep and tells it when they are ready. Its methods run in the loop thread.

    `check` raises if the parameters cannot be written; `behind_steps` marks the point in all streams, the
    poll's and those of steps, behind which nobody reads them; `wait_readers` returns when that is reached.
    """

    def __init__(
        self,
        lockstep: Lockstep,
        pausing: Pausing,
        tasks: anyio.abc.TaskGroup,
        *,
        check: Callable[[], None],
        behind_steps: Callable[[Stream], Event],
        wait_readers: Callable[[Event], Awaitable[None]],
    ) -> None:
        self._lockstep = lockstep
        self._pausing = pausing
        self._tasks = tasks
        self._check = check
        self._behind_steps = behind_steps
        self._wait_readers = wait_readers
        self.after: Event | None = None
        """The caller's work so far: what reads the parameters is before it."""

    def begin(
        self, answer: Future[Instruction], clock: UpdateClock, stream: Stream, thread: int, wait: bool
    ) -> None:
        """Hand over a poll of `thread`. Asking one that is ready would change threads twice."""
        first: Future[Instruction] = Future()
        first.add_done_callback(lambda _: attempt(answer, self._go_on, first, clock, stream, thread))
        self._lockstep.poll(first, wait=wait)

    def _go_on(
        self,
        answer: Future[Instruction],
        first: Future[Instruction],
        clock: UpdateClock,
        stream: Stream,
        thread: int,
    ) -> None:
        instruction = first.result()
        if isinstance(instruction, RunBeforeApply):
            clock.asked()
            if self._pausing.get_ready(self._check, thread):
                self.after = self._behind_steps(stream)
                clock.ready()
                self.answer(answer, instruction.hold, None)
                return
        answer.set_result(instruction)

    def answer(self, answer: Future[Instruction], hold: int, refusal: BaseException | None) -> None:
        """The poll is ready, or refuses."""
        if refusal is not None:
            self._lockstep.refused(answer, hold, f"{type(refusal).__name__}: {refusal}")
        elif self.after is None or self.after.is_done():
            self._lockstep.before_apply_done(answer, hold)
        else:
            self._tasks.start_soon(self._answer_later, answer, hold, self.after)

    async def _answer_later(self, answer: Future[Instruction], hold: int, after: Event) -> None:
        try:
            await self._wait_readers(after)
        except Exception as exc:  # reported to the poll, which raises it
            answer.set_exception(exc)
        else:
            self._lockstep.before_apply_done(answer, hold)


def attempt(answer: Future[Instruction], tell: Callable[..., None], *arguments: object) -> None:
    """Call `tell(answer, *arguments)`; what it raises is the answer."""
    try:
        tell(answer, *arguments)
    except Exception as exc:  # reported to the poll, which raises it
        answer.set_exception(exc)
