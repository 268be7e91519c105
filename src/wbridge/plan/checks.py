"""Checks of a finished plan: what a bug in the passes would break."""

from __future__ import annotations

import math

from wbridge.config import Config
from wbridge.errors import InternalError
from wbridge.ids import WorkerId
from wbridge.layout.dtype import itemsize
from wbridge.plan.demand import Demand
from wbridge.plan.types import Group, Plan, Transfer

_Elements = dict[WorkerId, dict[tuple[str, str], int]]
"""Elements by receiver and (parameter, tensor)."""


def check(plan: Plan, demand: Demand, config: Config) -> None:
    """Check that every needed element is delivered once, through groups that fit their slots.

    Raises:
        InternalError: the plan breaks its contract; the message names the receiver and the numbers.
    """
    next_index: dict[WorkerId, int] = {}
    delivered: _Elements = {}
    for group in plan.groups:
        _require(group.index == next_index.get(group.receiver, 0), group, "is out of order")
        next_index[group.receiver] = group.index + 1
        _require(group.nbytes <= config.slot_nbytes, group, f"exceeds slot_nbytes = {config.slot_nbytes}")
        _check_pieces(group)
        own = delivered.setdefault(group.receiver, {})
        for piece in group.pieces:
            for transfer in piece.transfers:
                pair = (transfer.target_parameter, transfer.tensor)
                own[pair] = own.get(pair, 0) + math.prod(transfer.extents)
    needed: _Elements = {}
    for need in demand.needs:
        own, pair = needed.setdefault(need.receiver, {}), (need.parameter, need.tensor)
        repeats = math.prod(extent for extent, _ in need.repeats)
        own[pair] = own.get(pair, 0) + need.region.num_elements * repeats
    if delivered != needed:
        raise InternalError(
            f"plan {plan.fingerprint[:12]} {_difference(delivered, needed)}; please report it"
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
    strides = transfer.wire.strides
    if 0 not in strides:
        return math.prod(transfer.extents)
    return math.prod(n for n, s in zip(transfer.extents, strides, strict=True) if s)


def _difference(delivered: _Elements, needed: _Elements) -> str:
    for receiver in sorted(delivered.keys() | needed.keys()):
        got, wanted = delivered.get(receiver, {}), needed.get(receiver, {})
        for parameter, tensor in sorted(got.keys() | wanted.keys()):
            pair = (parameter, tensor)
            if got.get(pair) != wanted.get(pair):
                return (
                    f"delivers {got.get(pair, 0)} elements of {tensor!r} to {parameter!r} of {receiver},"
                    f" which needs {wanted.get(pair, 0)}"
                )
    return "delivers what is needed"


def _require(condition: object, group: Group, problem: str) -> None:
    if not condition:
        raise InternalError(
            f"group {group.index} of {group.receiver} ({group.nbytes} bytes) {problem}; please report it"
        )
