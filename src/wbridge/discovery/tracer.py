"""Tracer: run a loader on tensors without storage and note what it would write where.

While a loader is watched, no operator reaches a live tensor: writes are recorded instead of executed.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any  # operator arguments and results are whatever the loader uses

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from wbridge.discovery.content import (
    CONSTANT,
    Computed,
    Content,
    FromCheckpoint,
    Piece,
    View,
    of_origin,
)
from wbridge.discovery.moves import aten, moves_of, put_moves, with_positions
from wbridge.discovery.specs import torch_dtype
from wbridge.discovery.traced import (
    Key,
    Traced,
    Twins,
    is_view,
    moved,
    num_stored,
    place_of,
    storage_key,
    tensors_in,
    written_by,
)
from wbridge.errors import LayoutError
from wbridge.layout.region import Region, Strided
from wbridge.layout.source_map import TensorSpec

_OVERWRITING = (
    "fill_",
    "zero_",
    "normal_",
    "uniform_",
    "random_",
    "bernoulli_",
    "exponential_",
    "log_normal_",
)
_REPLACING = ("set_", "resize_", "resize_as_")
_NEW = (
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
    "new_empty",
    "new_zeros",
    "new_ones",
    "new_full",
    "new_empty_strided",
)


class Tracer:
    """While it runs a loader's operators, knows for each storage what the loader has put there.

    `failure` keeps the first error raised into the loader, in case the loader swallows it.
    """

    def __init__(self, live: Mapping[str, torch.Tensor]) -> None:
        self.failure: LayoutError | None = None
        self._live: dict[int, list[tuple[str, torch.Tensor]]] = {}
        for name, tensor in live.items():
            self._live.setdefault(storage_key(tensor), []).append((name, tensor))
        self._contents: dict[Key, Content] = {}
        self.filling: dict[str, None] = {}
        """Checkpoint tensors that were put into a live one, if only until something else was."""
        self._kept: list[torch.Tensor] = []  # storages of the loader's own buffers must not be reused

    def checkpoint_tensor(self, name: str, spec: TensorSpec, device: torch.device) -> Traced:
        """Return a stand-in for a whole checkpoint tensor."""
        twin = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="meta")
        content = Content(whole=FromCheckpoint(name), num_elements=twin.numel())
        return Traced(twin, content, self, device)

    def pieces(self, tensor: torch.Tensor) -> list[Piece]:
        """Return what the loader put into a live tensor, counted from its first element."""
        content = self._contents.get((storage_key(tensor), tensor.dtype))
        if content is None:
            return []
        place = place_of(tensor)
        num_bytes = tensor.untyped_storage().nbytes()
        if num_bytes == tensor.numel() * tensor.itemsize == num_stored(tensor) * tensor.itemsize:
            return [Piece(p.origin, _shifted(p.region, -place.offset)) for p in content.pieces()]
        return list(content.written(View(tuple(tensor.shape), place), Strided(0, place.strides)))

    def was_written(self, tensor: torch.Tensor) -> bool:
        """Return whether anything was recorded for the storage of `tensor`."""
        return (storage_key(tensor), tensor.dtype) in self._contents

    def let_go(self) -> list[tuple[torch.Tensor, tuple[str, ...]]]:
        """Return what else holds checkpoint elements, as tensors of whole storages, and which.

        The loader has returned: its own buffers are gone when this lets go of them. What is still there
        belongs to somebody.
        """
        found: dict[Key, tuple[Any, tuple[str, ...]]] = {}  # Any: torch's reference is untyped
        for tensor in self._kept:
            key = storage_key(tensor), tensor.dtype
            if key[0] not in self._live and (names := self._contents[key].tensors()):
                found[key] = StorageWeakRef(tensor.untyped_storage()), names  # type: ignore[no-untyped-call]  # as above
        self._kept.clear()
        if any(not reference.expired() for reference, _ in found.values()):
            gc.collect()  # a buffer in a cycle of references
        beside: list[tuple[torch.Tensor, tuple[str, ...]]] = []
        for (_, dtype), (reference, names) in found.items():
            storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None:
                beside.append((torch.empty(0, dtype=dtype, device=storage.device).set_(storage), names))
        return beside

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Execute, follow or record one operator."""
        tensors = list(tensors_in(args, kwargs))
        is_tracked = any(self._is_tracked(t) for t in tensors)
        written = written_by(func, args, kwargs)
        if written and (is_tracked or any(storage_key(t) in self._live for t in written)):
            return self._write(func, args, kwargs, written)
        if is_tracked:
            return self._follow(func, args, kwargs, tensors)
        return func(*args, **kwargs)

    def _is_tracked(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, Traced) or (storage_key(tensor), tensor.dtype) in self._contents

    def _follow(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: list[torch.Tensor]
    ) -> Any:
        """Return what an operator makes of traced tensors: views, moved elements or a computed tensor."""
        traced = [t for t in tensors if isinstance(t, Traced)]
        if is_view(func) and not traced:
            return func(*args, **kwargs)  # of the loader's own buffer, whose content is found by its storage
        name = _short_name(func)
        args = self._with_positions(func, args)
        if torch.Tag.data_dependent_output in func.tags or (
            torch.Tag.dynamic_output_shape in func.tags and name not in ("index", "repeat_interleave")
        ):
            raise self._refusal(func, tensors)
        device = torch.device(kwargs.get("device") or (traced or tensors)[0].device)
        twins = Twins(self._contents)
        result = self._run_on_meta(func, args, kwargs, twins)
        if name in _NEW:
            return Traced(result, Content(), self, device)

        def wrap(out: Any) -> Any:
            if isinstance(out, (list, tuple)):
                return type(out)(wrap(o) for o in out)
            if not isinstance(out, torch.Tensor):
                return out
            content = twins.content(out)
            if content is None or func is aten.view.dtype:
                content = self._result(func, out, twins.some(args), kwargs, twins)
            return Traced(out, content, self, device)

        return wrap(result)

    def _with_positions(self, func: Any, args: Sequence[Any]) -> Sequence[Any]:
        if func not in (aten.index.Tensor, aten.index_put_.default):
            return args
        if any(
            index is not None and index.dtype is torch.bool and self._is_tracked(index) for index in args[1]
        ):
            raise self._refusal(func, [index for index in args[1] if index is not None])
        return (args[0], with_positions(args[1]), *args[2:])

    def _run_on_meta(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], twins: Twins) -> Any:
        on_meta = {k: v for k, v in twins.all(kwargs).items() if k not in ("pin_memory", "non_blocking")}
        if on_meta.get("device") is not None or _short_name(func) in _NEW:
            on_meta["device"] = torch.device("meta")
        return func(*twins.all(args), **on_meta)

    def _result(
        self, func: Any, out: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any], twins: Twins
    ) -> Content:
        content = Content()
        moves = None if func is aten.view.dtype else moves_of(func, out, args, twins.some(kwargs))
        if moves is None:
            tensors = twins.tensors()
            origin = Computed(_where(func), tensors) if tensors else CONSTANT
            place = Strided(int(out.storage_offset()), (1,))
            content.write([of_origin(origin, (max(num_stored(out), 1),), place)])
        else:
            content.write(moved(moves, twins))
        return content

    def _write(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], written: list[torch.Tensor]
    ) -> Any:
        """Record what an operator would write; nothing is executed."""
        if torch.Tag.inplace_view in func.tags or _short_name(func) in _REPLACING:
            names = [name for t in written for name, _ in self._live.get(storage_key(t), [])]
            names += [name for t in written if isinstance(t, Traced) for name in t.content.tensors()]
            raise self._fail(
                f"load_weights changes the storage or shape of {_quoted(names)} in place ({_where(func)}); "
                "parameters must stay where they are: make it copy into them, from a new view if need be"
            )
        if func is aten._foreach_copy_.default:
            for target, source in zip(args[0], args[1], strict=True):
                self._write(aten.copy_.default, (target, source), {}, [target])
            return None
        args = self._with_positions(func, args)
        twins = Twins(self._contents)
        twins.all(args), twins.all(kwargs)
        for target in written:
            if not target.numel():
                continue
            moves = put_moves(func, twins.of(target), twins.some(args), kwargs)
            if moves is not None:
                self._record(target, moved(moves, twins))
            else:
                self._record(target, [self._overwritten(func, args, target, twins)])
        return written[0] if len(func._schema.returns) == 1 else tuple(written) or None

    def _overwritten(self, func: Any, args: Sequence[Any], target: torch.Tensor, twins: Twins) -> Piece:
        """Return the one piece that an in-place operator other than a copy leaves in `target`."""
        tensors = twins.tensors(without=target if _short_name(func) in _OVERWRITING else None)
        origin = Computed(_where(func), tensors) if tensors else CONSTANT
        return of_origin(origin, tuple(target.shape), place_of(target))

    def _record(self, target: torch.Tensor, pieces: list[Piece]) -> None:
        if isinstance(target, Traced):
            target.content.write(pieces)
            return
        storage = storage_key(target)
        owners = self._live.get(storage)
        if owners:
            self.filling.update(dict.fromkeys(t for piece in pieces for t in piece.tensors))
        if owners and all(t.dtype != target.dtype for _, t in owners):
            self._record_reinterpreted(owners, pieces)
            return
        content = self._contents.get((storage, target.dtype))
        if content is None:
            content = self._contents[storage, target.dtype] = Content()
            self._kept.append(target)
        content.write(pieces)

    def _record_reinterpreted(self, owners: list[tuple[str, torch.Tensor]], pieces: list[Piece]) -> None:
        """The bytes of a parameter are written through another dtype: only the loader can repeat that."""
        tensors = tuple(dict.fromkeys(t for piece in pieces for t in piece.tensors))
        origin = Computed(_where(aten.view.dtype), tensors) if tensors else CONSTANT
        for _, owner in owners:
            whole = of_origin(origin, tuple(owner.shape), place_of(owner))
            self._record(owner, [whole])

    def _refusal(self, func: Any, tensors: list[torch.Tensor]) -> LayoutError:
        twins = Twins(self._contents)
        twins.all(tensors)
        return self._fail(
            f"load_weights looks at the values of checkpoint tensor {_quoted(twins.tensors())} "
            f"({_where(func)}), which a trace cannot follow; give source_map=discover(..., method='probe'),"
            " or declare the map"
        )

    def _fail(self, message: str) -> LayoutError:
        error = LayoutError(message)
        self.failure = self.failure or error
        return error


def _shifted(region: Region, by: int) -> Region:
    if not by:
        return region
    return Region(region.extents, region.source, Strided(region.target.offset + by, region.target.strides))


def _short_name(func: Any) -> str:
    return str(func._schema.name).rpartition("::")[2]


def _where(func: Any) -> str:
    """Name an operator and the first line outside torch and this package that led to it."""
    frame = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] != "torch" and not module.startswith("wbridge.discovery"):
            return f"{_short_name(func)} at {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
    return _short_name(func)


def _quoted(names: Sequence[str], shown: int = 3) -> str:
    rest = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(repr(n) for n in names[:shown]) + rest
