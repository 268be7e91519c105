"""What a torch trainer holds: FSDP2, tensor parallel and 2-D sharded modules, plain tensors among them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

from wbridge.discovery.specs import parameter_spec, row_major, tensor_spec
from wbridge.errors import ConfigError, LayoutError
from wbridge.ids import WorkerId
from wbridge.integrations.modules import LocalShards, local_tensor, named_state
from wbridge.integrations.shards import Run, compose, num_indices, shard_regions, shard_runs, whole_run
from wbridge.layout.region import Region, Strided
from wbridge.layout.source_map import Mapped, ParameterSpec, SourceMap
from wbridge.session.endpoints import Source


def source_from_module(
    module: torch.nn.Module,
    *,
    group: str = "trainer",
    mesh: DeviceMesh | None = None,
    whole: SourceMap | None = None,
) -> Source:
    """Describe this rank of a sharded module: its live local shards and where they lie in the checkpoint.

    `mesh` gives the worker's identity; by default it is the largest mesh among the parameters. `whole`
    says how the unsharded parameters form the checkpoint (`integrations.transformers.checkpoint_map`);
    by default each parameter is a checkpoint tensor of its own name. FSDP modules are resharded first.

    Raises:
        LayoutError: a placement is not a shard or replica, or `whole` does not fit the parameters.
        ConfigError: no mesh tells the ranks of this job apart.
    """
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()
    tensors, live = named_state(module)
    source_map = sharded_map(tensors, whole=whole or identity_map(tensors))
    return Source(
        worker=worker_id(tensors.values(), group=group, mesh=mesh),
        checkpoint=source_map.checkpoint,
        parameters=LocalShards(live),
        source_map=source_map,
    )


def worker_id(tensors: Iterable[torch.Tensor], *, group: str, mesh: DeviceMesh | None) -> WorkerId:
    """Return the identity of this rank: its coordinate in `mesh`, or in the largest mesh of the tensors.

    Raises:
        ConfigError: the rank is not in the mesh, or the mesh is only a part of the job.
    """
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    if mesh is None:
        meshes = [tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)]
        mesh = max(meshes, key=lambda m: (m.ndim, m.size()), default=None)
        if mesh is not None and mesh.size() != world:
            raise ConfigError(
                f"trainer {group!r}: the parameters' mesh has {mesh.size()} ranks, the job {world}; "
                "give the whole mesh as `mesh=`, so that every rank has its own identity"
            )
    if mesh is None:
        return WorkerId(role="trainer", group=group, mesh_shape=(world,), coordinate=(rank,))
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ConfigError(f"trainer {group!r}: rank {rank} is not in mesh {mesh}; give the mesh it is in")
    return WorkerId(
        role="trainer",
        group=group,
        mesh_shape=tuple(mesh.shape),
        coordinate=tuple(int(c) for c in coordinate),
    )


def identity_map(tensors: Mapping[str, torch.Tensor]) -> SourceMap:
    """Return the map of an unsharded module whose parameters are the checkpoint's tensors."""
    specs = {name: tensor_spec(tensor) for name, tensor in tensors.items()}
    parameters = {name: row_major(spec) for name, spec in specs.items()}
    mapped = []
    for name, spec in parameters.items():
        view = Strided(0, spec.strides)
        if all(spec.shape):
            mapped.append(Mapped(parameter=name, tensor=name, region=Region(spec.shape, view, view)))
    return SourceMap(checkpoint=specs, parameters=parameters, mapped=tuple(mapped), method="declared")


def sharded_map(tensors: Mapping[str, torch.Tensor], *, whole: SourceMap) -> SourceMap:
    """Return what this rank's local tensors hold, given the map of the unsharded parameters.

    Raises:
        LayoutError: a placement is not a shard or replica, or a shape does not fit.
    """
    parameters: dict[str, ParameterSpec] = {}
    held: dict[str, list[Region]] = {}
    for name, tensor in tensors.items():
        spec = row_major(tensor_spec(tensor))
        if whole.parameters.get(name) != spec:
            raise LayoutError(
                f"parameter {name!r} is {spec}, but the map of the unsharded module says "
                f"{whole.parameters.get(name)}; build both from the same module"
            )
        local, runs = local_tensor(tensor), _runs(name, tensor)
        if tuple(local.shape) != num_indices(runs):
            raise LayoutError(
                f"parameter {name!r}: the local shard has shape {tuple(local.shape)}, its placements "
                f"{getattr(tensor, 'placements', ())} say {num_indices(runs)}"
            )
        parameters[name] = parameter_spec(local)
        held[name] = shard_regions(runs, strides=spec.strides, local_strides=local.stride())
    mapped = [
        Mapped(parameter=entry.parameter, tensor=entry.tensor, region=region)
        for entry in whole.mapped
        for shard in held[entry.parameter]
        for region in compose(entry.region, shard)
    ]
    return SourceMap(
        checkpoint=whole.checkpoint, parameters=parameters, mapped=tuple(mapped), method="declared"
    )


def _runs(name: str, tensor: torch.Tensor) -> tuple[tuple[Run, ...], ...]:
    """Return the indices of each dimension that this rank holds.

    Placements apply from left to right. FSDP after tensor parallel shards in the other order and says so
    with a strided shard whose factor is the number of shards to its right: then right to left is exact,
    also where the sizes do not divide.
    """
    runs = [whole_run(n) for n in tensor.shape]
    if not isinstance(tensor, DTensor):
        return tuple(runs)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return tuple(() for _ in runs)
    steps: list[tuple[int, int, int]] = []
    deferred: list[tuple[int, int, int]] = []
    for mesh_dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            continue
        if not isinstance(placement, (Shard, _StridedShard)):
            raise LayoutError(
                f"parameter {name!r} has placement {placement} on mesh dimension {mesh_dim}: only shards and "
                "replicas hold weights; redistribute it before the weights are sent"
            )
        factor = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
        if factor > 1 and factor == _num_shards_right_of(tensor, mesh_dim, placement.dim):
            deferred.insert(0, (mesh_dim, placement.dim, 1))
        else:
            steps.append((mesh_dim, placement.dim, factor))
    for mesh_dim, dim, factor in steps + deferred:
        runs[dim] = shard_runs(
            runs[dim],
            num_shards=tensor.device_mesh.size(mesh_dim),
            index=int(coordinate[mesh_dim]),
            split_factor=factor,
        )
    return tuple(runs)


def _num_shards_right_of(tensor: DTensor, mesh_dim: int, dim: int) -> int:
    """Return into how many pieces the placements right of `mesh_dim` cut dimension `dim`."""
    return math.prod(
        tensor.device_mesh.size(right)
        for right in range(mesh_dim + 1, tensor.device_mesh.ndim)
        if getattr(tensor.placements[right], "dim", None) == dim
    )
