"""transformers models: how their parameters form the checkpoint, as trainers and as rollouts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from wbridge.discovery.export import trace_export
from wbridge.discovery.specs import parameter_spec, tensor_spec, torch_dtype
from wbridge.errors import LayoutError
from wbridge.ids import WorkerId
from wbridge.integrations.modules import LiveTensors, named_state
from wbridge.layout.source_map import Mapped, SourceMap, TensorSpec
from wbridge.session.endpoints import LoadWeights, Target

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

Tensors = Mapping[str, torch.Tensor]


def checkpoint_map(model: PreTrainedModel) -> SourceMap:
    """Return how the unsharded parameters of `model` form its checkpoint: fused experts, renamed layers.

    It follows what `save_pretrained` does, on tensors without storage. A tied parameter is listed under
    each of its names. The shapes are global: `model` may be sharded, or on the meta device.

    Raises:
        LayoutError: saving computes a tensor that no parameter holds.
    """
    from transformers.core_model_loading import revert_weight_conversion

    tensors, _ = named_state(model)

    def export(state: dict[str, torch.Tensor]) -> Tensors:
        converted: Tensors = revert_weight_conversion(model, state)
        return converted

    return trace_export(
        parameters={name: tensor_spec(tensor) for name, tensor in tensors.items()}, export=export
    )


def checkpoint_specs(model_or_config: PreTrainedModel | PretrainedConfig) -> dict[str, TensorSpec]:
    """Return what the checkpoint of this model holds, without building weights; tied tensors once."""
    from transformers import AutoModelForCausalLM, PreTrainedModel

    model = model_or_config
    if not isinstance(model, PreTrainedModel):
        dtype = getattr(model, "dtype", None) or torch.float32
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                model, dtype=torch_dtype(dtype) if isinstance(dtype, str) else dtype
            )
    source_map = checkpoint_map(model)
    tied = _tied_names(model)
    dropped = {m.tensor for m in source_map.mapped if m.parameter in tied}
    return {name: spec for name, spec in source_map.checkpoint.items() if name not in dropped}


def _tied_names(model: torch.nn.Module) -> set[str]:
    """Return the names under which a parameter appears again: a checkpoint stores the first only.

    The meta device ties nothing by storage, so identity of the parameters decides.
    """
    seen: set[int] = set()
    tied = set()
    for name, tensor in named_state(model)[0].items():
        if id(tensor) in seen:
            tied.add(name)
        seen.add(id(tensor))
    return tied


def load_weights_into(model: PreTrainedModel) -> LoadWeights:
    """Return a loader that copies checkpoint tensors, whole and in any order, into the live parameters.

    It returns the names it loaded, and raises `LayoutError` for a name it does not know.
    """
    source_map = checkpoint_map(model)
    _, live = named_state(model)
    places: dict[str, list[Mapped]] = {name: [] for name in source_map.checkpoint}
    for entry in source_map.mapped:
        places[entry.tensor].append(entry)

    def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set()
        with torch.no_grad():
            for name, tensor in weights:
                if name not in places:
                    raise LayoutError(
                        f"checkpoint tensor {name!r} is not part of this model, which has {len(places)}; "
                        "match the names, or leave it out"
                    )
                for entry in places[name]:
                    _view(live[entry.parameter], source_map, entry).copy_(_read(tensor, entry))
                loaded.add(name)
        return loaded

    return load_weights


def _read(tensor: torch.Tensor, entry: Mapped) -> torch.Tensor:
    """Return the elements of a checkpoint tensor that `entry` names."""
    flat, region = tensor.contiguous(), entry.region
    offset = flat.storage_offset() + region.source.offset
    return flat.as_strided(region.extents, region.source.strides, offset)


def _view(live: torch.Tensor, source_map: SourceMap, entry: Mapped) -> torch.Tensor:
    """Return the elements of a live parameter that `entry` names."""
    if parameter_spec(live) != source_map.parameters[entry.parameter]:
        raise LayoutError(
            f"parameter {entry.parameter!r} is {parameter_spec(live)}, but a loader of whole tensors needs "
            f"{source_map.parameters[entry.parameter]}; load before the model is sharded or converted"
        )
    offset = live.storage_offset() + entry.region.target.offset
    return live.as_strided(entry.region.extents, entry.region.target.strides, offset)


def target_from_model(
    model: PreTrainedModel,
    *,
    engine: str,
    after_apply: Callable[[], None] | None = None,
    atomic: tuple[tuple[str, ...], ...] = (),
) -> Target:
    """Describe an unsharded transformers model as the one rollout worker of `engine`."""
    _, live = named_state(model)
    tied = _tied_names(model)
    paths = {name: path for name, path in live.paths.items() if name not in tied}
    return Target(
        worker=WorkerId(role="rollout", group=engine, mesh_shape=(1,), coordinate=(0,)),
        checkpoint=checkpoint_specs(model),
        parameters=LiveTensors(model, paths),
        load_weights=load_weights_into(model),
        after_apply=after_apply,
        atomic=atomic,
    )
