"""What every transport checks before it sends."""

from __future__ import annotations

from typing import Final

from wbridge.errors import ProtocolError
from wbridge.transport.base import RemoteSlot

MAX_MESSAGE_NBYTES: Final = 64 * 1024


def check_message(payload: bytes, peer: str) -> None:
    """Raises `ProtocolError` for a message or notification that is too long."""
    if len(payload) > MAX_MESSAGE_NBYTES:
        raise ProtocolError(
            f"message of {len(payload)} bytes to {peer}: the limit is {MAX_MESSAGE_NBYTES}; use put for bulk"
        )


def check_put(source: memoryview, remote: RemoteSlot, notify: bytes, peer: str) -> None:
    """Raises `ProtocolError` unless `source` is contiguous and as long as the slot."""
    check_message(notify, peer)
    if source.nbytes != remote.nbytes or not source.c_contiguous:
        raise ProtocolError(
            f"a put of {source.nbytes} bytes to {peer} into a slot of {remote.nbytes}: "
            "put the whole slot from contiguous memory"
        )
