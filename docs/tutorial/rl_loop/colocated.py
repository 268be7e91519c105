"""A trainer and an engine in one process: the rollout samples in a thread of its own."""

from __future__ import annotations

import threading

from report import Channels
from rollout import Rollout
from task import Settings
from trainer import join_trainers, train


def run_colocated(rank: int, settings: Settings, channels: Channels) -> None:
    """The life of one process that trains and samples."""
    join_trainers(rank, settings)
    rollout = Rollout(rank, settings, channels)  # vLLM makes groups of one inside the trainers' group
    failure: list[BaseException] = []

    def sample() -> None:
        try:
            rollout.run()
        except BaseException as exc:
            failure.append(exc)
            raise

    sampling = threading.Thread(target=sample, name="rollout", daemon=True)
    sampling.start()
    train(rank, settings, channels)
    sampling.join()
    if failure:
        raise RuntimeError("the rollout of this process failed") from failure[0]
    # vLLM ends the process groups when the process exits, the trainers' among them.
