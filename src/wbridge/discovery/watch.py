"""Send every operator of a block through a tracer or shadows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any  # operator arguments and results are whatever the loader uses

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from wbridge.discovery.traced import Runner


@contextmanager
def watching(*runners: Runner) -> Iterator[None]:
    """Let `runners` execute every operator that this thread calls in the block, last first; no gradients.

    Other threads of a loader are not covered: what they do with weights is, because `Traced` and
    `Carried` tensors call their runner in any thread.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for runner in runners:
            stack.enter_context(_Mode(runner))
        yield


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__ is untyped
    def __init__(self, runner: Runner) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's is untyped
        self._runner = runner

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first operator imports torch._dynamo: a second and 70 MB

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._runner.run(func, args, kwargs or {})
