"""From a plan's transfers to the plain blocks that a device copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from wbridge.device.copy import Block
from wbridge.flow.messages import Placement
from wbridge.layout.dtype import itemsize
from wbridge.plan.types import Group, Piece, Transfer


def iter_source_blocks(piece: Piece) -> Iterator[Block]:
    """Yield the sender's side of a piece, in bytes from the start of the group's slot."""
    for transfer in piece.transfers:
        yield Block(
            parameter=transfer.source_parameter,
            extents=transfer.extents,
            parameter_offset=transfer.source.offset,
            parameter_strides=transfer.source.strides,
            dtype=transfer.wire_dtype,
            slot_offset=_slot_offset(transfer),
            slot_strides=transfer.wire.strides,
        )


def iter_in_place_blocks(piece: Piece, placements: Mapping[str, Placement]) -> Iterator[Block]:
    """Yield the sender's side of a piece whose slot is the memory that the target parameters lie in."""
    for transfer in piece.transfers:
        place = placements[transfer.target_parameter]
        yield Block(
            parameter=transfer.source_parameter,
            extents=transfer.extents,
            parameter_offset=transfer.source.offset,
            parameter_strides=transfer.source.strides,
            dtype=place.dtype,
            slot_offset=place.offset + transfer.target.offset * itemsize(place.dtype),
            slot_strides=transfer.target.strides,
        )


def iter_target_blocks(group: Group) -> Iterator[Block]:
    """Yield the receiver's side of all pieces of a group."""
    for piece in group.pieces:
        for transfer in piece.transfers:
            yield Block(
                parameter=transfer.target_parameter,
                extents=transfer.extents,
                parameter_offset=transfer.target.offset,
                parameter_strides=transfer.target.strides,
                dtype=transfer.wire_dtype,
                slot_offset=_slot_offset(transfer),
                slot_strides=transfer.wire.strides,
            )


def _slot_offset(transfer: Transfer) -> int:
    return transfer.slot_offset + transfer.wire.offset * itemsize(transfer.wire_dtype)
