"""Lifeline: learn at once, from the kernel, that a process of this host has died."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from wbridge.errors import PeerLost
from wbridge.transport.host import pid_of, process_token


class Lifeline:
    """Watches processes through pidfds on the loop that opened it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._watched: dict[str, tuple[int, list[Callable[[], None]]]] = {}

    def watch(self, process: str, on_death: Callable[[], None]) -> None:
        """Call `on_death` once the process ends; nothing if it cannot be seen from here, or is this one.

        Raises:
            PeerLost: it has ended already.
        """
        pid = pid_of(process)
        if pid is None or pid == os.getpid():
            return
        if process not in self._watched:
            descriptor = _open(pid, process)
            self._watched[process] = (descriptor, [])
            self._loop.add_reader(descriptor, self._died, process)
        self._watched[process][1].append(on_death)

    def unwatch(self, process: str, on_death: Callable[[], None]) -> None:
        """Undo one `watch`; nothing if there was none."""
        _, callbacks = self._watched.get(process, (0, []))
        if on_death in callbacks:
            callbacks.remove(on_death)
            if not callbacks:
                self._forget(process)

    def close(self) -> None:
        for process in list(self._watched):
            self._forget(process)

    def _died(self, process: str) -> None:
        for on_death in self._forget(process):
            on_death()

    def _forget(self, process: str) -> list[Callable[[], None]]:
        descriptor, callbacks = self._watched.pop(process)
        self._loop.remove_reader(descriptor)
        os.close(descriptor)
        return callbacks


def _open(pid: int, process: str) -> int:
    """Open the process, and make sure that its number was not given to another one meanwhile."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        raise _ended(pid) from None
    try:
        if process_token(pid) != process:
            raise ProcessLookupError
    except ProcessLookupError:
        os.close(descriptor)
        raise _ended(pid) from None
    return descriptor


def _ended(pid: int) -> PeerLost:
    return PeerLost(f"process {pid} has ended; start it again, or go on without it")
