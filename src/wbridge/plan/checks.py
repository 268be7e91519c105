"""Checks of a finished plan: what a bug in the passes would break."""

from __future__ import annotations

import math
from collections.abc import Iterator

from wbridge.config import Config
from wbridge.errors import InternalError
from wbridge.ids import WorkerId
from wbridge.layout.dtype import itemsize
from wbridge.plan.demand import Demand
from wbridge.plan.types import Group, Plan, Transfer


def check(plan: Plan, demand: Demand, config: Config) -> None:
    """Check that every needed element is delivered once, through groups that fit their slots.

    Raises:
        InternalError: the plan breaks its contract; the message names the receiver and the numbers.
    """
    next_index: dict[WorkerId, int] = {}
    delivered: dict[tuple[WorkerId, str, str], int] = {}
    for group in plan.groups:
        _require(group.index == next_index.get(group.receiver, 0), group, "is out of order")
        next_index[group.receiver] = group.index + 1
        _require(group.nbytes <= config.slot_nbytes, group, f"exceeds slot_nbytes = {config.slot_nbytes}")
        _check_pieces(group)
        for transfer in _transfers(group):
            key = (group.receiver, transfer.target_parameter, transfer.tensor)
            delivered[key] = delivered.get(key, 0) + math.prod(transfer.extents)
    needed: dict[tuple[WorkerId, str, str], int] = {}
    for need in demand.needs:
        num_elements = need.region.num_elements * math.prod(extent for extent, _ in need.repeats)
        key = (need.receiver, need.parameter, need.tensor)
        needed[key] = needed.get(key, 0) + num_elements
    for key in needed.keys() | delivered.keys():
        if needed.get(key) != delivered.get(key):
            raise InternalError(
                f"plan {plan.fingerprint[:12]} delivers {delivered.get(key, 0)} elements of {key[2]!r} to"
                f" {key[1]!r} of {key[0]}, which needs {needed.get(key, 0)}; please report it"
            )


def _check_pieces(group: Group) -> None:
    end = 0
    for piece in group.pieces:
        _require(piece.offset >= end, group, f"has overlapping pieces at byte {piece.offset}")
        end = piece.offset
        for transfer in piece.transfers:
            element_nbytes = itemsize(transfer.wire_dtype)
            _require(transfer.slot_offset == end, group, f"has a gap in a piece at byte {end}")
            _require(end % element_nbytes == 0, group, f"has a misaligned transfer at byte {end}")
            end += wire_elements(transfer) * element_nbytes
        _require(end == piece.offset + piece.nbytes, group, f"has a piece that ends at {end}")
    _require(end == group.nbytes, group, f"ends at {end}")
    writers = [piece.writer for piece in group.pieces]
    _require(len(set(writers)) == len(writers), group, "has two pieces of one writer")


def wire_elements(transfer: Transfer) -> int:
    """Return the elements that travel: replicating loops do not count."""
    return math.prod(n for n, s in zip(transfer.extents, transfer.wire.strides, strict=True) if s)


def _transfers(group: Group) -> Iterator[Transfer]:
    return (transfer for piece in group.pieces for transfer in piece.transfers)


def _require(condition: object, group: Group, problem: str) -> None:
    if not condition:
        raise InternalError(
            f"group {group.index} of {group.receiver} ({group.nbytes} bytes) {problem}; please report it"
        )
