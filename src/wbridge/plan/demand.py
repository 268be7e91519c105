"""The demand pass: what each rollout worker needs, and which trainers hold elements of those tensors."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence

import msgspec

from wbridge.config import Config
from wbridge.errors import LayoutError, PlanError
from wbridge.ids import WorkerId
from wbridge.layout.region import Region
from wbridge.layout.source_map import Mapped, SourceMap, TensorSpec
from wbridge.plan.geometry import at_origin, distinct, region_key


class Need(msgspec.Struct, frozen=True, gc=False):
    """One region of a rollout parameter, with its target offset and its replicating loops taken apart."""

    receiver: WorkerId
    parameter: str
    tensor: str
    dtype: str
    region: Region
    offset: int
    repeats: tuple[tuple[int, int], ...]


class Holding(msgspec.Struct, frozen=True, gc=False):
    """A place in a trainer's parameter where a region of a supply starts."""

    worker: WorkerId
    parameter: str
    offset: int


class Supply(msgspec.Struct, frozen=True):
    """Who holds what of one checkpoint tensor: for each different region, those that hold it."""

    spec: TensorSpec
    dtype: str
    regions: tuple[Region, ...]
    holdings: tuple[tuple[Holding, ...], ...]


class Demand(msgspec.Struct, frozen=True):
    """The needs of all rollout workers, in a canonical order, and the supply of every tensor needed."""

    needs: tuple[Need, ...]
    supplies: dict[str, Supply]
    unused: tuple[str, ...]
    """Tensors that trainers hold and no rollout needs."""


def find_demand(maps: Mapping[WorkerId, SourceMap], config: Config) -> Demand:
    """Match what rollouts need with what trainers hold, by checkpoint tensor name.

    Raises:
        PlanError: a role is absent, a pattern matches nothing, or no trainer has a needed tensor.
        LayoutError: two workers disagree on a tensor's shape, or on a dtype that cannot be cast.
    """
    trainers = sorted(worker for worker in maps if worker.role == "trainer")
    rollouts = sorted(worker for worker in maps if worker.role == "rollout")
    for role, present in (("trainer", trainers), ("rollout", rollouts)):
        if not present:
            raise PlanError(f"no {role} has reported a source map; a plan needs at least one of each role")
    needed = _Included(config.include)
    needs = tuple(need for worker in rollouts for need in _needs_of(worker, maps[worker], needed))
    if not needs and config.include and any(maps[worker].mapped for worker in rollouts):
        raise PlanError(f"include = {config.include} matches no checkpoint tensor that a rollout needs")
    names = {need.tensor for need in needs}
    held = {mapped.tensor for worker in trainers for mapped in maps[worker].mapped}
    if missing := sorted(names - held):
        raise PlanError(_unmatched(missing, names=names, held=held, needs=needs))
    supplies = _find_supplies(trainers, maps, names)
    checked: set[tuple[str, str]] = set()
    for need in needs:
        _check_pair(need, supplies[need.tensor], maps, checked)
    return Demand(needs=needs, supplies=supplies, unused=tuple(sorted(held - names)))


class _Included:
    """The set of checkpoint tensors that some `include` pattern matches."""

    def __init__(self, patterns: tuple[str, ...]) -> None:
        joined = "|".join(fnmatch.translate(pattern) for pattern in patterns)
        self._matches = re.compile(joined).match if patterns else None

    def __contains__(self, tensor: str) -> bool:
        return self._matches is None or self._matches(tensor) is not None


def _needs_of(worker: WorkerId, source_map: SourceMap, included: _Included) -> list[Need]:
    for tensors in (*(target.tensors for target in source_map.opaque), *source_map.atomic):
        chosen = [tensor for tensor in tensors if tensor in included]
        if chosen and len(chosen) < len(tensors):
            left_out = next(tensor for tensor in tensors if tensor not in included)
            raise PlanError(
                f"{worker}: the loader needs {len(tensors)} tensors in one call, but include has"
                f" {chosen[0]!r} and not {left_out!r}; include all of them or none"
            )
    needs: list[Need] = []
    for mapped in sorted(source_map.mapped, key=_mapped_key):
        if mapped.tensor in included:
            region, repeats = distinct(mapped.region)
            needs.append(
                Need(
                    receiver=worker,
                    parameter=mapped.parameter,
                    tensor=mapped.tensor,
                    dtype=source_map.parameters[mapped.parameter].dtype,
                    region=at_origin(region),
                    offset=region.target.offset,
                    repeats=repeats,
                )
            )
    return needs


def _find_supplies(
    trainers: Sequence[WorkerId], maps: Mapping[WorkerId, SourceMap], names: set[str]
) -> dict[str, Supply]:
    found: dict[str, dict[Region, list[Holding]]] = {name: {} for name in names}
    origin: dict[str, tuple[WorkerId, TensorSpec, str]] = {}
    for worker in trainers:
        source_map = maps[worker]
        for mapped in sorted(source_map.mapped, key=_mapped_key):
            if mapped.tensor not in names:
                continue
            dtype = source_map.parameters[mapped.parameter].dtype
            spec = source_map.checkpoint[mapped.tensor]
            first, first_spec, first_dtype = origin.setdefault(mapped.tensor, (worker, spec, dtype))
            if spec.shape != first_spec.shape:
                raise LayoutError(_shapes_differ(mapped.tensor, first, first_spec, worker, spec))
            if dtype != first_dtype:
                raise LayoutError(
                    f"{mapped.tensor!r} is {first_dtype} on {first} but {dtype} on {worker}"
                    f" (parameter {mapped.parameter!r}); keep one dtype on all trainers"
                )
            holding = Holding(worker=worker, parameter=mapped.parameter, offset=mapped.region.target.offset)
            found[mapped.tensor].setdefault(at_origin(mapped.region), []).append(holding)
    supplies: dict[str, Supply] = {}
    for name in sorted(names):
        regions = tuple(sorted(found[name], key=region_key))
        holdings = tuple(tuple(found[name][region]) for region in regions)
        _, spec, dtype = origin[name]
        supplies[name] = Supply(spec=spec, dtype=dtype, regions=regions, holdings=holdings)
    return supplies


def _check_pair(
    need: Need, supply: Supply, maps: Mapping[WorkerId, SourceMap], checked: set[tuple[str, str]]
) -> None:
    spec = maps[need.receiver].checkpoint[need.tensor]
    if spec.shape != supply.spec.shape:
        trainer = supply.holdings[0][0].worker
        raise LayoutError(_shapes_differ(need.tensor, trainer, supply.spec, need.receiver, spec))
    pair = (supply.dtype, need.dtype)
    if pair in checked:
        return
    if need.dtype != supply.dtype and not all("float" in dtype for dtype in pair):
        holding = supply.holdings[0][0]
        raise LayoutError(
            f"{need.tensor!r} is {supply.dtype} in {holding.parameter!r} of {holding.worker} but {need.dtype}"
            f" in {need.parameter!r} of {need.receiver}; only float types are cast, so make the two equal"
        )
    checked.add(pair)


def _mapped_key(mapped: Mapped) -> tuple[object, ...]:
    return mapped.tensor, mapped.parameter, *region_key(mapped.region)


def _shapes_differ(
    tensor: str, left: WorkerId, left_spec: TensorSpec, right: WorkerId, right_spec: TensorSpec
) -> str:
    return (
        f"{tensor!r} has global shape {left_spec.shape} on {left} but {right_spec.shape} on {right};"
        " both must describe the whole checkpoint tensor, without padding and before sharding"
    )


def _unmatched(missing: list[str], *, names: set[str], held: set[str], needs: Sequence[Need]) -> str:
    receiver = next(need.receiver for need in needs if need.tensor == missing[0])
    spare = sorted(held - names)
    return (
        f"no trainer has {len(missing)} of the {len(names)} tensors that rollouts need:"
        f" {_some(missing)} (the first is needed by {receiver}); of {len(held)} tensors that trainers hold,"
        f" {len(spare)} are needed by no rollout: {_some(spare)}."
        " Map the names of one side to the other's, or leave tensors out with `include`"
    )


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "none"
