"""The moves of one worker by partner, in an order that both sides share; strided ends are staged."""

from __future__ import annotations

import torch

from benchmarks.systems.worker import Context


class Ends:
    """Addresses and sizes of this worker's ends of its moves."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Part of a parameter, and the contiguous tensor that stands for it."""
        self.by_partner: dict[int, list[tuple[int, int]]] = {}
        for move in context.moves:
            part = context.part(move)
            if not part.is_contiguous():
                stand_in = torch.zeros(part.shape, dtype=part.dtype)
                self.staged.append((part, stand_in))
                part = stand_in
            partner = move.rollout if context.is_trainer else move.trainer
            self.by_partner.setdefault(partner, []).append((part.data_ptr(), part.nbytes))

    @property
    def regions(self) -> list[tuple[int, int]]:
        """What has to be registered: each parameter on its own, as they are, and the stand-ins."""
        tensors = [*self._context.parameters.values(), *(buffer for _, buffer in self.staged)]
        return [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]

    def gather(self) -> None:
        for part, buffer in self.staged:
            buffer.copy_(part)

    def scatter(self) -> None:
        for part, buffer in self.staged:
            part.copy_(buffer)
