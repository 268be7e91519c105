"""Gathering: the compiled copies from one set of tensors into gather slots."""

from __future__ import annotations

from collections.abc import Sequence

from wbridge.device.base import Event, Stream
from wbridge.device.copy import CopyPlan, Tensors, build_gather, gather
from wbridge.errors import InternalError
from wbridge.plan.types import Piece
from wbridge.staging.blocks import iter_source_blocks
from wbridge.staging.slots import Place


class Gathering:
    """All pieces that this worker writes, compiled against `tensors`."""

    def __init__(self, stream: Stream, pieces: Sequence[Piece], tensors: Tensors) -> None:
        self._stream = stream
        # A piece is known by identity: it is large, and hashing it would cost more than copying it.
        self._pieces = tuple(pieces)
        self._copies: dict[int, CopyPlan] = {
            id(piece): build_gather(iter_source_blocks(piece), tensors) for piece in self._pieces
        }

    @property
    def stream(self) -> Stream:
        return self._stream

    def start(self, piece: Piece, place: Place) -> Event:
        """Copy `piece` to `place`, whatever its offset in the group."""
        copies = self._copies.get(id(piece))
        if copies is None:
            raise InternalError(
                f"this sender was not built for the piece of {piece.writer} at {piece.offset}"
            )
        return gather(self._stream, copies, place.buffer, base=place.offset - piece.offset)
