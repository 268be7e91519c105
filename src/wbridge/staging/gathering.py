"""Gathering: the compiled copies from one set of tensors into gather slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from wbridge.device.base import Buffer, Event, Stream
from wbridge.device.copy import CopyPlan, Tensors, build_gather, gather
from wbridge.device.runs import Runs
from wbridge.errors import InternalError
from wbridge.flow.messages import Placement
from wbridge.plan.types import Piece
from wbridge.staging.blocks import iter_in_place_blocks, iter_source_blocks
from wbridge.staging.runs import runs_of_weights
from wbridge.staging.slots import Place


class Gathering:
    """All pieces that this worker writes, compiled against `tensors`."""

    def __init__(self, stream: Stream, pieces: Sequence[Piece], tensors: Tensors) -> None:
        self._stream = stream
        self._tensors = tensors
        self._in_place: dict[int, CopyPlan] = {}
        self._runs: dict[int, Runs | None] = {}
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
            raise self._unknown(piece)
        return gather(self._stream, copies, place.buffer, base=place.offset - piece.offset)

    def start_in_place(self, piece: Piece, buffer: Buffer, placements: Mapping[str, Placement]) -> Event:
        """Copy `piece` into the receiver's parameters in `buffer`. The placements of a piece never change."""
        if id(piece) not in self._copies:
            raise self._unknown(piece)
        copies = self._in_place.get(id(piece))
        if copies is None:
            blocks = iter_in_place_blocks(piece, placements)
            copies = self._in_place[id(piece)] = build_gather(blocks, self._tensors)
        return gather(self._stream, copies, buffer)

    def runs(self, piece: Piece, placements: Mapping[str, Placement]) -> Runs | None:
        """Return the runs from the tensors into the receiver's parameters, if `piece` consists of such.

        Raises:
            LayoutError: a tensor's storage was resized.
        """
        if id(piece) not in self._copies:
            raise self._unknown(piece)
        if id(piece) not in self._runs:
            self._runs[id(piece)] = runs_of_weights(piece, placements, self._tensors)
        runs = self._runs[id(piece)]
        if runs is not None:
            runs.check()
        return runs

    @staticmethod
    def _unknown(piece: Piece) -> InternalError:
        return InternalError(f"this sender was not built for the piece of {piece.writer} at {piece.offset}")
