"""What two ucxx transports say to each other: msgspec structs, each at most one UCX message.

A connection has one direction. The connecting side chooses its number and the accepting side answers
through an endpoint of its own. Frames of one connection arrive in the order of sending.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from wbridge.errors import ProtocolError


class UcxAddress(msgspec.Struct, frozen=True):
    """How to reach a transport: UCX worker address, host identity and process token; and what it can do."""

    worker: bytes
    host: str
    process: str
    puts: bool
    """Whether it writes into the memory of peers; otherwise bytes go to it and come from it as messages."""
    has_gpu: bool
    """Whether these puts may go between its GPU and those of peers."""


class _Frame(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all frames. `connection` is the number that the connecting side chose."""

    connection: int


class Hello(_Frame, frozen=True):
    """Opens a connection; `name` is the sender's, `address` where answers go."""

    name: str
    address: UcxAddress


class Welcome(_Frame, frozen=True):
    """Answers `Hello`: at most `window` messages may be unread at a time."""

    window: int


class Text(_Frame, frozen=True):
    """A message."""

    payload: bytes


class Small(_Frame, frozen=True):
    """A put short enough to travel with its notification."""

    token: bytes
    data: bytes
    notify: bytes


class Begin(_Frame, frozen=True):
    """The bytes of a put follow as one message of their own."""

    token: bytes
    nbytes: int


class End(_Frame, frozen=True):
    """The sender's part of a put is done: notify when the bytes are there."""

    token: bytes
    notify: bytes


class Drop(_Frame, frozen=True):
    """The put was cancelled: no notification."""

    token: bytes


class Flush(_Frame, frozen=True):
    """Answer `Flushed` when no put of this connection is being received."""

    number: int


class Flushed(_Frame, frozen=True):
    number: int


class Taken(_Frame, frozen=True):
    """The receiving side's reader has taken this many more messages."""

    count: int


class Region(_Frame, frozen=True):
    """Memory of the accepting side where grants may lie; told once."""

    number: int
    address: int
    nbytes: int
    key: bytes


class Forget(_Frame, frozen=True):
    """The accepting side has no such memory any more."""

    number: int


class Revoke(_Frame, frozen=True):
    """Answer `Revoked` when nothing of this grant is being written, and write nothing more."""

    token: bytes


class Revoked(_Frame, frozen=True):
    token: bytes


class Bye(_Frame, frozen=True):
    """The connecting side closed the connection; `is_still`: it writes nothing any more."""

    is_still: bool = True


class Gone(_Frame, frozen=True):
    """The accepting side closed its transport."""


ToReceiver: TypeAlias = Text | Small | Begin | End | Drop | Flush | Revoked | Bye
ToSender: TypeAlias = Welcome | Flushed | Taken | Region | Forget | Revoke | Gone
Frame: TypeAlias = Hello | ToReceiver | ToSender

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


def encode(frame: Frame) -> bytes:
    """Return length and body: a receive buffer does not tell how much of it was filled."""
    body = _ENCODER.encode(frame)
    return len(body).to_bytes(4, "little") + body


def decode(data: memoryview) -> Frame:
    """Raises `ProtocolError` for anything but a frame of this version."""
    try:
        return _DECODER.decode(data[4 : 4 + int.from_bytes(data[:4], "little")])
    except msgspec.MsgspecError as exc:
        raise ProtocolError(f"a UCX message is no frame of this version of wbridge: {exc}") from exc


def data_tag(token: bytes) -> int:
    """The tag under which the bytes of a put travel; frames have small tags."""
    return int.from_bytes(token[:8], "little") | 1 << 63
