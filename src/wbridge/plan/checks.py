"""Checks of a finished plan: what a bug in the passes would break."""

from __future__ import annotations

import math

from wbridge.errors import InternalError
from wbridge.layout.dtype import itemsize
from wbridge.plan.classes import needed_region
from wbridge.plan.geometry import Geometry, at_origin, distinct
from wbridge.plan.types import Group, Place, Plan, PlannedCell, PlannedClass, Transfer


def check(plan: Plan, geometry: Geometry) -> None:
    """Check for each class that every needed element is delivered once, in blocks that owners divide.

    Raises:
        InternalError: the plan breaks its contract; the message names the tensor and the numbers.
    """
    for planned in plan.classes:
        delivered: dict[Place, int] = {}
        for cell in planned.cells:
            _check_counts(plan, planned, cell)
            for place in cell.needed:
                row = plan.row(place)
                repeats = math.prod(extent for extent, _ in distinct(row.region)[1])
                wanted = at_origin(needed_region(row.region))
                overlaps = geometry.overlaps(cell.region, wanted)
                got = sum(math.prod(overlap.extents) for overlap in overlaps) * repeats
                delivered[place] = delivered.get(place, 0) + got
        for place, got in delivered.items():
            row = plan.row(place)
            if got != row.region.num_elements:
                raise InternalError(
                    f"plan {plan.fingerprint[:12]} delivers {got} elements of {planned.tensors()[0]!r} to"
                    f" row {place[1]} of table {place[0]}, which needs {row.region.num_elements};"
                    " please report it"
                )


def _check_counts(plan: Plan, planned: PlannedClass, cell: PlannedCell) -> None:
    num_units = planned.num_tensors * cell.num_blocks
    for host, counts in cell.counts.items():
        if sum(counts) != num_units or len(counts) != len(cell.owners) or min(counts) < 0:
            raise InternalError(
                f"plan {plan.fingerprint[:12]} divides {num_units} blocks of {planned.tensors()[0]!r} for"
                f" host {host!r} into {counts}; please report it"
            )


def check_group(group: Group, slot_nbytes: int) -> None:
    """Check that a group fits its slot and that its pieces have neither gaps nor overlaps.

    Raises:
        InternalError: it does not; the message names the receiver and the numbers.
    """
    _require(group.nbytes <= slot_nbytes, group, f"exceeds slot_nbytes = {slot_nbytes}")
    end = 0
    for piece in group.pieces:
        _require(piece.offset >= end, group, f"has overlapping pieces at byte {piece.offset}")
        end = piece.offset
        sizes: dict[int, int] = {}
        for transfer in piece.transfers:
            start, element_nbytes = transfer.slot_offset, itemsize(transfer.wire_dtype)
            _require(start % element_nbytes == 0, group, f"has a misaligned transfer at byte {start}")
            sizes[start] = sizes.get(start, 0) + wire_elements(transfer) * element_nbytes
        ends = [*list(sizes)[1:], piece.offset + piece.nbytes]
        for (start, nbytes), stop in zip(sizes.items(), ends, strict=True):
            whole = start == end and stop > start and nbytes % (stop - start) == 0
            _require(whole, group, f"has a block at byte {start} that does not reach to {stop}")
            end = stop
    _require(end == group.nbytes, group, f"ends at {end}")
    writers = [piece.writer for piece in group.pieces]
    _require(len(set(writers)) == len(writers), group, "has two pieces of one writer")


def wire_elements(transfer: Transfer) -> int:
    """Return the elements that travel: replicating loops do not count."""
    strides = transfer.wire.strides
    if 0 not in strides:
        return math.prod(transfer.extents)
    return math.prod(n for n, s in zip(transfer.extents, strides, strict=True) if s)


def _require(condition: object, group: Group, problem: str) -> None:
    if not condition:
        raise InternalError(
            f"group {group.index} of {group.receiver} ({group.nbytes} bytes) {problem}; please report it"
        )
