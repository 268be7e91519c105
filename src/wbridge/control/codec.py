"""Frames of the control plane: a 4-byte big-endian length, then one msgpack-encoded message."""

from __future__ import annotations

import msgspec

from wbridge.control.messages import Digested, EpochStart, Join, Keyed, Message, Verified, Verify
from wbridge.errors import ProtocolError

HEADER_NBYTES = 4
MAX_FRAME_NBYTES = 256 * 2**20
"""Bound of the frames that carry maps, plans and digests."""
MAX_SMALL_NBYTES = 2**20
"""Bound of every other frame."""
MAX_UNAUTHENTICATED_NBYTES = 4 * 2**10
"""Bound of a frame from a peer that has not shown the secret yet."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Return the whole frame.

    Raises:
        ProtocolError: the message is larger than its kind may be.
    """
    body = _encoder.encode(message)
    _check_nbytes(message, len(body))
    return len(body).to_bytes(HEADER_NBYTES, "big") + body


def decode_header(header: bytes | bytearray, limit_nbytes: int) -> int:
    """Return the length of the body.

    Raises:
        ProtocolError: it exceeds `limit_nbytes`.
    """
    nbytes = int.from_bytes(header, "big")
    if nbytes > limit_nbytes:
        raise ProtocolError(
            f"a frame of {nbytes} bytes was announced, at most {limit_nbytes} are accepted here"
        )
    return nbytes


def decode(body: bytes) -> Message:
    """Return the message.

    Raises:
        ProtocolError: the bytes are no control message.
    """
    try:
        message = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolError(f"{len(body)} bytes are no wbridge control message: {exc}") from exc
    _check_nbytes(message, len(body))
    return message


def _check_nbytes(message: Message, nbytes: int) -> None:
    content = message.message if isinstance(message, Keyed) else message
    is_large = isinstance(content, Join | EpochStart | Verify | Digested | Verified)
    limit = MAX_FRAME_NBYTES if is_large else MAX_SMALL_NBYTES
    if nbytes > limit:
        raise ProtocolError(f"{type(message).__name__} takes {nbytes} bytes, at most {limit} are allowed")
