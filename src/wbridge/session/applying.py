"""Applying: the loop thread's part of an apply, from the commit to the answer of the lockstep."""

from __future__ import annotations

import asyncio

import anyio.abc

from wbridge.device.base import Event
from wbridge.engine.lockstep import Lockstep
from wbridge.engine.receive import ReceiveEngine
from wbridge.errors import UpdateAborted
from wbridge.flow.actions import Apply


class Applying:
    """Writes committed versions into the parameters: at once, where nothing has to be waited for.

    `has_rest`: the backend has something to do when they are written, which the poll runs.
    """

    def __init__(self, lockstep: Lockstep, tasks: anyio.abc.TaskGroup, *, has_rest: bool) -> None:
        self._lockstep = lockstep
        self._tasks = tasks
        self._has_rest = has_rest

    def begin(self, engine: ReceiveEngine, apply: Apply, after: Event) -> None:
        """Write what `engine` has, or will have, not before `after` is done."""
        if engine.begin_apply(apply.ticket, after):
            self._written(apply)
            asyncio.get_running_loop().call_soon(engine.release)  # nobody waits for this
        else:
            self._tasks.start_soon(self._go_on, engine, apply)

    async def _go_on(self, engine: ReceiveEngine, apply: Apply) -> None:
        try:
            await engine.apply(apply.ticket)
        except UpdateAborted as exc:
            is_tainted = engine.num_written > 0
            self._lockstep.apply_ended(apply.hold, "tainted" if is_tainted else "aborted", str(exc))
        except BaseException as exc:  # a failed copy, or the adapter closes: neither old nor new
            self._lockstep.apply_ended(apply.hold, "tainted", f"{type(exc).__name__}: {exc}")
            if not isinstance(exc, Exception):
                raise
        else:
            self._written(apply)
        finally:
            engine.release()  # the engine waits for what is above, nobody for this

    def _written(self, apply: Apply) -> None:
        if self._has_rest:
            self._lockstep.written(apply.hold)
        else:
            self._lockstep.apply_ended(apply.hold, "applied")
