"""Files in shared memory: each trainer saves its shard with safetensors, rollouts wait for it and map it."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.systems.scratch import PREFIX, directory_in_memory
from benchmarks.systems.worker import Context

POLL_S = 0.001


class System:
    def __init__(self, context: Context) -> None:
        self._context = context

    def setup(self) -> None:
        directory = tempfile.mkdtemp(prefix=PREFIX, dir=directory_in_memory()) if self._is_first else ""
        self._directory = Path(self._context.exchange(directory)[0])

    def push(self, version: int) -> None:
        path = self._path(self._context.rank, version)
        self._path(self._context.rank, version - 1).unlink(missing_ok=True)  # one version is kept
        written = path.with_suffix(".written")
        save_file(self._context.parameters, written)
        os.rename(written, path)

    def pull(self, version: int, tokens: object) -> None:
        context = self._context
        for trainer in range(context.workload.job.num_trainers):
            path = self._path(trainer, version)
            while not path.exists():
                time.sleep(POLL_S)
            with safe_open(path, "pt") as file:
                for move in context.moves:
                    if move.trainer == trainer:
                        context.part(move).copy_(move.source_box.of(file.get_tensor(move.source)))

    def close(self) -> None:
        if self._is_first:
            shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def _is_first(self) -> bool:
        return self._context.is_trainer and self._context.rank == 0

    def _path(self, trainer: int, version: int) -> Path:
        return self._directory / f"shard-{trainer}.{version}"
