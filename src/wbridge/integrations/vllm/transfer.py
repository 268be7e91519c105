"""The weight-transfer backend that vLLM creates in each worker of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any  # vLLM's untyped dictionaries

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

import wbridge
from wbridge.errors import ConfigError
from wbridge.integrations.vllm.target import target_of_rank
from wbridge.session.updates import RolloutHooks, Update


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not typed
    """What `init_weight_transfer_engine` takes: where to meet, as which engine, with which settings."""

    engine: str
    rendezvous: str | None = None
    secret: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    connect_timeout_s: float | None = None


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]  # vLLM is not typed
    """What `update_weights` takes: how long to wait for a version."""

    wait_s: float = 60.0


class BridgeTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]  # vLLM is not typed
    """One worker's end of the bridge. Once initialised it takes new versions between engine steps.

    The calls of vLLM's own update cycle work too: `update_weights` waits for the next version.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    receiver: wbridge.sync.ReceiverAdapter | None = None
    hooks: RolloutHooks | None = None
    """Set it before initialising to act around each update."""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Meet the trainers and the other engines. Blocks until all are there."""
        self.shutdown()
        target = target_of_rank(self.model, engine=init_info.engine, vllm_config=self.vllm_config)
        receiver = wbridge.sync.ReceiverAdapter(
            target,
            rendezvous=init_info.rendezvous,
            config=init_info.config,
            hooks=self.hooks,
            secret=init_info.secret,
        )
        try:
            receiver.connect(init_info.connect_timeout_s)
        except BaseException:
            receiver.close()
            raise
        self.receiver = receiver

    def poll(self, wait_s: float | None = None) -> Update | None:
        """Take a new version if there is one; every worker of the engine must call it equally often.

        Raises:
            ConfigError: the engine has not been initialised.
        """
        if self.receiver is None:
            raise ConfigError(
                f"engine of {self.model_config.model}: call init_weight_transfer_engine with at least "
                "{'engine': NAME, 'rendezvous': ADDRESS} before asking for weights"
            )
        return self.receiver.poll_requests(wait_s=wait_s)

    def start_weight_update(self) -> None:
        """Nothing to prepare: a version is applied whole, in one poll."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Wait for the next version and apply it; return without one after `wait_s`."""
        self.poll(wait_s=update_info.wait_s)

    def finish_weight_update(self) -> None:
        """Nothing to finish: see `start_weight_update`."""

    def shutdown(self) -> None:
        receiver, self.receiver = self.receiver, None
        if receiver is not None:
            receiver.close()
