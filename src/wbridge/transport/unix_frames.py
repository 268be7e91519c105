"""What travels over the unix sockets of the shared-memory transport, one frame a packet."""

from __future__ import annotations

import struct
from typing import Final, NamedTuple, TypeAlias

import msgspec

from wbridge.errors import ProtocolError

MAX_FRAME_NBYTES: Final = 64 * 1024 + 64
"""A message of the longest kind with its header."""

_NOTIFICATION: Final = struct.Struct("<cIQ")
_SEGMENT: Final = struct.Struct("<cIQ")
_SLOT: Final = struct.Struct("<IQIQ")


class UnixAddress(msgspec.Struct, frozen=True):
    """Where a transport listens, in the abstract namespace, and the secret that lets a writer in."""

    name: bytes
    secret: bytes


class Hello(msgspec.Struct, frozen=True):
    """The writer's first frame."""

    secret: bytes
    name: str


class Segment(NamedTuple):
    """Memory that the writer may map, or a GPU's that it may open; its descriptor comes with the frame."""

    number: int
    nbytes: int
    is_host: bool = True


class SegmentEnd(NamedTuple):
    """Nothing is exposed there any more: the writer lets go of it, so that the memory can be freed."""

    number: int


class Payload(NamedTuple):
    payload: bytes


class Notification(NamedTuple):
    """The bytes of an exposure are in place."""

    entry: int
    word: int
    payload: bytes


class TableFrame(NamedTuple):
    """The descriptor of the exposure table comes with the frame: the writer is let in."""


Frame: TypeAlias = Segment | SegmentEnd | Payload | Notification | TableFrame


class SlotToken(NamedTuple):
    """Where an exposed slot lies, and the word of its entry in the exposure table."""

    segment: int
    offset: int
    entry: int
    word: int

    def encode(self) -> bytes:
        return _SLOT.pack(*self)


def is_slot_token(token: bytes) -> bool:
    return len(token) == _SLOT.size


def decode_slot(token: bytes, peer: str) -> SlotToken:
    """Raises `ProtocolError` for a slot that was exposed by another kind of transport."""
    if not is_slot_token(token):
        raise ProtocolError(f"{peer} exposed a slot that is not in shared memory; connect again")
    return SlotToken(*_SLOT.unpack(token))


def encode(frame: Frame) -> bytes:
    match frame:
        case Payload(payload):
            return b"P" + payload
        case Notification(entry, word, payload):
            return _NOTIFICATION.pack(b"N", entry, word) + payload
        case Segment(number, nbytes, is_host):
            return _SEGMENT.pack(b"S" if is_host else b"G", number, nbytes)
        case SegmentEnd(number):
            return _SEGMENT.pack(b"E", number, 0)
        case TableFrame():
            return b"T"


def decode(packet: bytes, peer: str) -> Frame:
    """Raises `ProtocolError` for what is no frame."""
    try:
        match packet[:1]:
            case b"P":
                return Payload(packet[1:])
            case b"N":
                _, entry, word = _NOTIFICATION.unpack_from(packet)
                return Notification(entry, word, packet[_NOTIFICATION.size :])
            case b"S" | b"G" as kind:
                _, number, nbytes = _SEGMENT.unpack(packet)
                return Segment(number, nbytes, kind == b"S")
            case b"E":
                return SegmentEnd(_SEGMENT.unpack(packet)[1])
            case b"T":
                return TableFrame()
    except struct.error:
        pass  # too short
    raise ProtocolError(f"{peer} sent {len(packet)} bytes that are no frame of this version")


def encode_hello(hello: Hello) -> bytes:
    return msgspec.msgpack.encode(hello)


def decode_hello(packet: bytes) -> Hello | None:
    """None: it is no hello."""
    try:
        return msgspec.msgpack.decode(packet, type=Hello)
    except msgspec.MsgspecError:
        return None
