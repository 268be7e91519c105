"""Lets the reference run without CUDA: streams and events that do nothing, and tensors that stay on the host.

The paths between GPUs of one node, which cannot exist here, are turned off.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from typing import Any

import torch

HOST = "127.0.0.1"
FAR = 1 << 40


class Nothing:
    """An event that has happened, and a stream that has nothing to do."""

    def __init__(self, *arguments: object, **named: object) -> None:
        return

    def record(self, *arguments: object) -> None:
        return

    def synchronize(self) -> None:
        return

    def query(self) -> bool:
        return True

    def wait(self, *arguments: object) -> None:
        return

    def wait_event(self, event: object) -> None:
        return

    def wait_stream(self, stream: object) -> None:
        return


def install() -> None:
    os.environ |= {"WBRIDGE_SAME_NODE_IPC": "0", "WBRIDGE_TOPO_EXCHANGE": "0", "NODEIP": HOST}
    cuda: Any = torch.cuda  # it does not know these as its own
    cuda.Event = cuda.Stream = Nothing
    cuda.current_device = lambda: 0
    cuda.current_stream = lambda *arguments: Nothing()
    cuda.synchronize = lambda *arguments: None
    cuda.stream = cuda.device = lambda value: contextlib.nullcontext()
    cuda.mem_get_info = lambda *arguments: (FAR, FAR)
    tensor: Any = torch.Tensor
    tensor.pin_memory = lambda self, *arguments, **named: self
    router = importlib.import_module("wbridge.backend.router")
    distributed = importlib.import_module("wbridge.utils.distributed")
    router.get_local_ip = distributed.get_local_ip = lambda: HOST
    _stay_on_host(router.WBEndpoint)
    router.WBEndpoint._init_engine = _init_engine


def _stay_on_host(endpoint: Any) -> None:
    set_up = endpoint.set_up_connection

    def set_up_connection(self: Any, **named: Any) -> Any:
        self.cuda_device = "cpu"
        return set_up(self, **named)

    endpoint.set_up_connection = set_up_connection


def _init_engine(self: Any, protocol: str) -> None:
    """Mooncake over TCP, whatever was asked for; and its local engine where something is staged."""
    mooncake = importlib.import_module("wbridge.backend.rdma.mooncake")
    engine = mooncake.MooncakeEngine()
    engine.init(HOST, "tcp", "")
    self.engine, self.session, self.local_engine = engine, engine.session_id(), None
    if self.sender_staging or self.receiver_staging:
        local = importlib.import_module("wbridge.backend.rdma.local")
        self.local_engine = local.LocalStagingEngine()
        self.local_engine._session, self.local_engine._stream = "local://host", None
