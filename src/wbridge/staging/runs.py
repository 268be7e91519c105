"""From a plan's transfers to runs: pieces that a put takes from the weights straight into the parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from wbridge.device.copy import Tensors, dtype_of
from wbridge.device.runs import Run, Runs
from wbridge.flow.messages import Placement
from wbridge.layout.dtype import itemsize
from wbridge.plan.types import Group, Piece, Transfer

MIN_NBYTES: Final = 4096
"""Of a run on average: below that, a copy into a slot costs less than a run more."""


def land_in_runs(groups: Sequence[Group], targets: Tensors) -> bool:
    """Whether all pieces can be put into the parameters as they lie in a slot."""
    pieces = [piece for group in groups for piece in group.pieces]
    return all(
        piece.nbytes > MIN_NBYTES * len(piece.transfers)
        and all(_lands_in_a_run(transfer, targets) for transfer in piece.transfers)
        for piece in pieces
    )


def runs_of_weights(piece: Piece, placements: Mapping[str, Placement], weights: Tensors) -> Runs | None:
    """Return the runs from where the weights are. None: they do not lie like that, or not on the host."""
    tensors = [weights[transfer.source_parameter] for transfer in piece.transfers]
    starts = []
    for transfer, tensor in zip(piece.transfers, tensors, strict=True):
        if tensor.device.type != "cpu" or dtype_of(tensor) != transfer.wire_dtype:
            return None
        if not _is_run(transfer.extents, transfer.source.strides):
            return None
        starts.append(tensor.data_ptr() + transfer.source.offset * tensor.itemsize)
    return Runs(_iter_runs(piece, placements, starts), tensors)


def runs_of_slot(piece: Piece, placements: Mapping[str, Placement]) -> Runs:
    """Return the runs from where the piece lies in a gather slot, counted from the start of the piece."""
    starts = [
        transfer.slot_offset - piece.offset + transfer.wire.offset * itemsize(transfer.wire_dtype)
        for transfer in piece.transfers
    ]
    return Runs(_iter_runs(piece, placements, starts))


def _iter_runs(piece: Piece, placements: Mapping[str, Placement], starts: Sequence[int]) -> Iterator[Run]:
    for transfer, start in zip(piece.transfers, starts, strict=True):
        place, width = placements[transfer.target_parameter], itemsize(transfer.wire_dtype)
        target = place.offset + transfer.target.offset * width
        yield Run(start, target, math.prod(transfer.extents) * width)


def _lands_in_a_run(transfer: Transfer, targets: Tensors) -> bool:
    strides = transfer.wire.strides, transfer.target.strides
    is_run = all(_is_run(transfer.extents, own) for own in strides)
    return is_run and dtype_of(targets[transfer.target_parameter]) == transfer.wire_dtype


def _is_run(extents: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements follow each other in the order of the loops."""
    num_elements = 1
    for extent, stride in zip(reversed(extents), reversed(strides), strict=True):
        if extent != 1 and stride != num_elements:
            return False
        num_elements *= extent
    return True
