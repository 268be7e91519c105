"""Messages on the data path: a small msgpack frame keyed by its epoch."""

from __future__ import annotations

import msgspec

from wbridge.errors import ProtocolError
from wbridge.flow.messages import Alive, Arrived, Credit, Placed, Stopped, Unwanted
from wbridge.ids import Epoch

DataMessage = Credit | Arrived | Placed | Stopped | Alive | Unwanted


class DataFrame(msgspec.Struct, frozen=True, array_like=True):
    """A data-path message with its epoch; a receiver drops one of another epoch."""

    epoch: Epoch
    message: DataMessage


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[DataFrame] = msgspec.msgpack.Decoder(DataFrame)


def encode(epoch: Epoch, message: DataMessage) -> bytes:
    return _encoder.encode(DataFrame(epoch, message))


def decode(payload: bytes, peer: str) -> DataFrame:
    """Return the frame.

    Raises:
        ProtocolError: the bytes are no data-path message; names the peer.
    """
    try:
        return _decoder.decode(payload)
    except msgspec.MsgspecError as exc:
        raise ProtocolError(f"{peer} sent {len(payload)} bytes that are no data-path message: {exc}") from exc
