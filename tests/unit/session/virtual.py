"""Tests of whole jobs in virtual time, where a deadline passes only when nothing else can happen."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable

from wbridge.testing.clock import run_virtual


def virtual(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test in virtual time. Its adapters need devices without threads: `LoopDevice`."""

    @functools.wraps(test)
    def run(*arguments: object, **named: object) -> None:
        run_virtual(lambda: test(*arguments, **named))

    return run
