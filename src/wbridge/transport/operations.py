"""Operations: the running calls of one endpoint, which its closing or its peer's loss ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio

from wbridge.errors import WBridgeError


class Operations:
    """Runs calls until `end`, which makes running and later ones raise the given error."""

    def __init__(self) -> None:
        self._scopes: set[anyio.CancelScope] = set()
        self._build_error: Callable[[], WBridgeError] | None = None

    @property
    def ended(self) -> bool:
        return self._build_error is not None

    @contextmanager
    def run(self) -> Iterator[None]:
        """Surround one call. Cancelled by the caller: passes through unchanged."""
        if self._build_error is not None:
            raise self._build_error()
        with anyio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                yield
            finally:
                self._scopes.discard(scope)
        if scope.cancelled_caught and self._build_error is not None:
            raise self._build_error()

    def end(self, build_error: Callable[[], WBridgeError]) -> None:
        """The first reason stays."""
        if self._build_error is None:
            self._build_error = build_error
        for scope in list(self._scopes):
            scope.cancel()
