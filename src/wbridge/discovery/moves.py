"""Operators that move elements without changing them, each as copies between views.

A move is a pair (view of the result, view of an argument) with the same shape, on meta tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, islice
from typing import Any  # operator arguments are whatever the loader passed

import torch

from wbridge.discovery.decode import decode
from wbridge.layout.region import Strided

Move = tuple[torch.Tensor, torch.Tensor]

MAX_MOVES = 4096
"""An index that needs more moves than this is treated as arithmetic: the loader runs on the receiver."""

aten: Any = torch.ops.aten  # made at run time


def moves_of(
    func: object, result: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]
) -> list[Move] | None:
    """Return the moves of a call that makes `result`, or None when it computes."""
    move = _MOVES.get(func)
    if move is None:
        return None
    return _bounded(move(result, *args) if move is _whole else move(result, *args, **kwargs))


def put_moves(
    func: object, target: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]
) -> list[Move] | None:
    """Return the moves of a call that writes into `target`, or None when it computes."""
    if func in (aten.copy_.default, aten.fill_.Tensor):
        return [(target, args[1].expand(target.shape))]
    if func is aten.cat.out:
        return list(_cat(target, *args))
    if func is aten.stack.out:
        return list(_stack(target, *args))
    if func is aten.index_copy_.default:
        return _bounded(_put(target, args[1], args[2], args[3]))
    accumulate_values = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    if func is aten.index_put_.default and not accumulate_values:
        dim = _only_index(args[1])
        if dim is not None and args[1][dim].dim() == 1:
            return _bounded(_put(target, dim, args[1][dim], args[2]))
    return None


def with_positions(indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Replace a mask on one dimension by the positions it picks."""
    return [
        index.nonzero().flatten()
        if index is not None and index.dtype is torch.bool and index.dim() == 1
        else index
        for index in indices
    ]


def _bounded(moves: Iterable[Move] | None) -> list[Move] | None:
    if moves is None:
        return None
    taken = list(islice(moves, MAX_MOVES + 1))
    return taken if len(taken) <= MAX_MOVES else None


def _whole(result: torch.Tensor, source: torch.Tensor, *_: object) -> Iterable[Move]:
    return [(result, source)]


def _same_order(result: torch.Tensor, source: torch.Tensor, *_: object) -> Iterable[Move]:
    return [(result.view(source.shape), source)]


def _cat(result: torch.Tensor, tensors: Sequence[torch.Tensor], dim: int = 0) -> Iterable[Move]:
    parts = [t for t in tensors if t.shape != (0,)]  # torch skips these whatever the rank
    starts = accumulate((t.shape[dim] for t in parts), initial=0)
    return [(result.narrow(dim, start, t.shape[dim]), t) for t, start in zip(parts, starts, strict=False)]


def _stack(result: torch.Tensor, tensors: Sequence[torch.Tensor], dim: int = 0) -> Iterable[Move]:
    return [(result.select(dim, index), part) for index, part in enumerate(tensors)]


def _repeat(result: torch.Tensor, source: torch.Tensor, repeats: Sequence[int]) -> Iterable[Move]:
    while source.dim() < len(repeats):
        source = source.unsqueeze(0)
    paired = [n for pair in zip(repeats, source.shape, strict=True) for n in pair]
    for dim in reversed(range(source.dim())):
        source = source.unsqueeze(dim)
    return [(result.view(paired), source.expand(paired))]


def _pad(result: torch.Tensor, source: torch.Tensor, pad: Sequence[int], *_: object) -> Iterable[Move]:
    for k in range(len(pad) // 2):
        before, after = pad[2 * k], pad[2 * k + 1]
        dim = source.dim() - 1 - k
        size = source.shape[dim] + min(before, 0) + min(after, 0)
        source = source.narrow(dim, max(-before, 0), size)
        result = result.narrow(dim, max(before, 0), size)
    return [(result, source)]


def _roll(
    result: torch.Tensor, source: torch.Tensor, shifts: Sequence[int], dims: Sequence[int] = ()
) -> Iterable[Move] | None:
    if len(dims) != 1:
        return None
    return _select(result, source, dims[0], torch.arange(source.shape[dims[0]]).roll(shifts[0]))


def _flip(result: torch.Tensor, source: torch.Tensor, dims: Sequence[int]) -> Iterable[Move] | None:
    if len(dims) != 1:
        return None
    return _select(result, source, dims[0], torch.arange(source.shape[dims[0]]).flip(0))


def _index(
    result: torch.Tensor, source: torch.Tensor, indices: Sequence[torch.Tensor | None]
) -> Iterable[Move] | None:
    dim = _only_index(indices)
    if dim is None:
        return None
    index = indices[dim]
    assert index is not None
    flat = (*source.shape[:dim], index.numel(), *source.shape[dim + 1 :])
    return _select(result.view(flat), source, dim, index.flatten())


def _only_index(indices: Sequence[torch.Tensor | None]) -> int | None:
    """Return the one dimension that is indexed, if it is one and its positions are known."""
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    if len(dims) != 1:
        return None
    index = indices[dims[0]]
    return dims[0] if index is not None and index.dtype is not torch.bool else None


def _put(target: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> Iterable[Move] | None:
    shape = (*target.shape[:dim], index.numel(), *target.shape[dim + 1 :])
    moves = _select(source.expand(shape), target, dim, index)
    return None if moves is None else ((t, s) for s, t in moves)


def _select(
    result: torch.Tensor, source: torch.Tensor, dim: int, index: torch.Tensor
) -> Iterable[Move] | None:
    """Pick positions of one dimension, in as few strided views as the index allows."""
    if index.is_meta:  # it comes from the checkpoint
        return None
    dim %= source.dim()
    picked = index.to("cpu", torch.int64) % max(source.shape[dim], 1)
    regions = decode(picked, torch.arange(picked.numel()))
    return (
        (_along(result, dim, g.extents, g.target), _along(source, dim, g.extents, g.source)) for g in regions
    )


def _along(tensor: torch.Tensor, dim: int, extents: Sequence[int], place: Strided) -> torch.Tensor:
    """Walk dimension `dim` in these loops instead of one by one; the loops come last."""
    sizes, strides = list(tensor.shape), list(tensor.stride())
    del sizes[dim], strides[dim]
    step = tensor.stride(dim)
    sizes += extents
    strides += [step * s for s in place.strides]
    return tensor.as_strided(sizes, strides, tensor.storage_offset() + place.offset * step)


_MOVES: dict[object, Callable[..., Iterable[Move] | None]] = {
    aten.clone.default: _whole,
    aten._to_copy.default: _whole,
    aten.lift_fresh_copy.default: _whole,
    aten.view_copy.default: _same_order,
    aten._reshape_copy.default: _same_order,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.repeat.default: _repeat,
    aten.constant_pad_nd.default: _pad,
    aten.roll.default: _roll,
    aten.flip.default: _flip,
    aten.index_select.default: lambda result, source, dim, index: _select(result, source, dim, index),
    aten.index.Tensor: _index,
}
"""What no move covers is constant, such as a padding."""
