"""NIXL with its UCX backend: trainers write into the rollouts' own parameters. Options: `tls` for UCX_TLS.

Every parameter is registered on its own. Waiting sleeps 50 us between two looks, for two cores' sake.
"""

from __future__ import annotations

import os
import time
from typing import Any

from nixl_cu12._api import nixl_agent, nixl_agent_config

from benchmarks.systems.pairs import Ends
from benchmarks.systems.worker import Context

POLL_S = 50e-6
DONE = b"done"


class System:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._num_early = 0
        if "tls" in context.options:
            os.environ["UCX_TLS"] = context.options["tls"]
        os.environ |= {"NIXL_LOG_LEVEL": "WARN", "UCX_LOG_LEVEL": "error"}

    def setup(self) -> None:
        context = self._context
        name = f"{context.role}-{context.rank}-{os.getpid()}"
        config = nixl_agent_config(enable_prog_thread=True, backends=["UCX"])
        self._agent = agent = nixl_agent(name, config)
        self._ends = Ends(context)
        self._registered = agent.register_memory(
            [(address, nbytes, 0, "") for address, nbytes in self._ends.regions], "DRAM"
        )
        found = context.exchange((name, agent.get_agent_metadata(), self._ends.by_partner))
        num_trainers = context.workload.job.num_trainers
        others = found[num_trainers:] if context.is_trainer else found[:num_trainers]
        for _, metadata, _ in others:
            agent.add_remote_agent(metadata)
        self._transfers = []
        if context.is_trainer:
            for rollout, (other, _, theirs) in enumerate(others):
                if context.rank in theirs:
                    self._transfers.append(self._prepare(other, rollout, theirs[context.rank]))
        context.exchange(None)

    def push(self, version: int) -> None:
        pending = [
            transfer
            for transfer in self._transfers
            if not self._is_done(self._agent.transfer(transfer, DONE))
        ]
        while pending:
            pending = [t for t in pending if not self._is_done(self._agent.check_xfer_state(t))]
            if pending:
                time.sleep(POLL_S)

    def pull(self, version: int, tokens: object) -> None:
        num_trainers = self._context.workload.job.num_trainers
        num_arrived = self._num_early
        while num_arrived < num_trainers:
            num_arrived += sum(map(len, self._agent.get_new_notifs().values()))
            if num_arrived < num_trainers:
                time.sleep(POLL_S)
        self._num_early = num_arrived - num_trainers
        self._ends.scatter()

    def close(self) -> None:
        return

    def _prepare(self, other: str, rollout: int, theirs: list[tuple[int, int]]) -> Any:
        ours = [(address, nbytes, 0) for address, nbytes in self._ends.by_partner[rollout]]
        local = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", ours, "DRAM")
        remote = self._agent.prep_xfer_dlist(
            other, [(address, nbytes, 0) for address, nbytes in theirs], "DRAM"
        )
        indices = list(range(len(ours)))
        return self._agent.make_prepped_xfer("WRITE", local, indices, remote, indices, DONE)

    @staticmethod
    def _is_done(state: str) -> bool:
        if state == "ERR":
            raise RuntimeError("a NIXL transfer failed")
        return state == "DONE"
