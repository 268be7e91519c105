"""Probe: send the index of every checkpoint element through the real loader and see where it ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from wbridge.discovery.decode import decode
from wbridge.discovery.shadow import Shadows
from wbridge.discovery.specs import parameter_spec
from wbridge.discovery.trace import Discovered, LoadWeights, distinct
from wbridge.discovery.traced import num_stored
from wbridge.discovery.watch import watching
from wbridge.errors import LayoutError
from wbridge.layout.algebra import normalize
from wbridge.layout.source_map import Mapped, SourceMap, TensorSpec

_UNTOUCHED = -1


def probe(
    *,
    checkpoint: Mapping[str, TensorSpec],
    parameters: Mapping[str, torch.Tensor],
    load_weights: LoadWeights,
    buffers: Mapping[str, torch.Tensor] | None = None,
    atomic: Iterable[Iterable[str]] = (),
) -> Discovered:
    """Run `load_weights` twice on integers that number all checkpoint elements, up and down.

    It writes into integer twins; live tensors are never touched. An element that does not come out
    the same way in both runs is no copy. Costs the memory and the time of two real loads.

    Raises:
        LayoutError: a parameter is computed, has no memory, or the loader fails on integers.
    """
    live = {**parameters, **(buffers or {})}
    without_memory = next((name for name, tensor in live.items() if tensor.is_meta), None)
    if without_memory is not None:
        raise LayoutError(
            f"parameter {without_memory!r} is on the meta device; only method='trace' works there"
        )
    numbering = _Numbering(checkpoint)
    up = _run(live, load_weights, numbering.weights(descending=False), numbering.dtype)
    down = _run(live, load_weights, numbering.weights(descending=True), numbering.dtype)
    kept: dict[str, torch.Tensor] = {}
    mapped: list[Mapped] = []
    unfed, untouched = {}, {}
    for name, tensor in distinct(live).items():
        a, b = up[name], down[name]
        source = numbering.index(name, a, b)
        if name not in parameters and not bool((source >= 0).any()):
            continue
        kept[name] = tensor
        mapped += numbering.mapped(name, tensor, source)
        if num := int((source < 0).sum()):
            unfed[name] = num
        if num := int((a == _UNTOUCHED).sum()):
            untouched[name] = num
    source_map = SourceMap(
        checkpoint=dict(checkpoint),
        parameters={name: parameter_spec(tensor) for name, tensor in kept.items()},
        mapped=tuple(mapped),
        atomic=tuple(tuple(names) for names in atomic),
        unfed=tuple(unfed.items()),
        method="probe",
    )
    return Discovered(source_map, untouched)


def _run(
    live: Mapping[str, torch.Tensor],
    load_weights: LoadWeights,
    weights: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    shadows = Shadows(live.values(), fill=_UNTOUCHED, dtype=dtype)
    try:
        with watching(shadows):
            load_weights((name, shadows.carry(numbers)) for name, numbers in weights)
    except LayoutError:
        raise
    except Exception as exc:  # foreign code: whatever it raises means that it cannot be probed
        raise LayoutError(
            f"load_weights failed on integer tensors: {type(exc).__name__}: {exc}; use method='trace', "
            "or declare the map"
        ) from exc
    return {name: shadows.of(tensor) for name, tensor in live.items()}


class _Numbering:
    """A number from 1 for each checkpoint element: `1 + i` ascending, `2 * total - i` descending."""

    def __init__(self, checkpoint: Mapping[str, TensorSpec]) -> None:
        self._specs = checkpoint
        self._names = list(checkpoint)
        sizes = [torch.Size(spec.shape).numel() for spec in checkpoint.values()]
        self._starts = torch.tensor([0, *sizes], dtype=torch.int64).cumsum(0)
        self._total = sum(sizes)
        self.dtype = torch.int32 if 2 * self._total < 2**31 else torch.int64

    def weights(self, *, descending: bool) -> Iterator[tuple[str, torch.Tensor]]:
        for k, (name, spec) in enumerate(self._specs.items()):
            index = torch.arange(int(self._starts[k]), int(self._starts[k + 1]))
            numbers = 2 * self._total - index if descending else 1 + index
            yield name, numbers.to(self.dtype).view(spec.shape)

    def index(self, name: str, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        """Return the checkpoint index in each element, -1 for constants, in row-major order.

        Raises:
            LayoutError: some element is neither.
        """
        a, b = up.reshape(-1).to("cpu", torch.int64), down.reshape(-1).to("cpu", torch.int64)
        index = a - 1
        is_copy = (index >= 0) & (index < self._total) & (b == 2 * self._total - index)
        wrong = ~is_copy & (a != b)
        if bool(wrong.any()):
            at = torch.unravel_index(wrong.nonzero()[0, 0], up.shape)
            raise LayoutError(
                f"parameter {name!r} does not hold copies of checkpoint elements (first at "
                f"{tuple(int(i) for i in at)}): the loader computes it; use method='trace', "
                "which updates it through the loader"
            )
        return torch.where(is_copy, index, -1)

    def mapped(self, name: str, tensor: torch.Tensor, source: torch.Tensor) -> Iterator[Mapped]:
        """Yield the regions of one parameter."""
        place = torch.arange(num_stored(tensor)).as_strided(tensor.shape, tensor.stride()).reshape(-1)
        owner = torch.bucketize(source, self._starts, right=True) - 1
        fed = (source >= 0).nonzero().flatten()
        order = fed[owner[fed].argsort(stable=True)]
        owners, counts = torch.unique_consecutive(owner[order], return_counts=True)
        for part, k in zip(torch.split(order, counts.tolist()), owners.tolist(), strict=True):
            for region in decode(source[part] - self._starts[k], place[part]):
                yield Mapped(name, self._names[k], normalize(region))
