"""Moves the weights of distributed trainers into distributed rollout engines.

Every public name loads on first use, so that importing the package is cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wbridge import sync as sync
    from wbridge import testing as testing
    from wbridge.config import Config as Config
    from wbridge.config import Mode as Mode
    from wbridge.control.messages import Difference as Difference
    from wbridge.control.messages import EngineCheck as EngineCheck
    from wbridge.control.messages import Unverifiable as Unverifiable
    from wbridge.control.messages import Verification as Verification
    from wbridge.device.sharing import share_memory as share_memory
    from wbridge.errors import AuthenticationError as AuthenticationError
    from wbridge.errors import BarrierTimeout as BarrierTimeout
    from wbridge.errors import ConfigError as ConfigError
    from wbridge.errors import CoverageError as CoverageError
    from wbridge.errors import DeviceFailed as DeviceFailed
    from wbridge.errors import EndpointClosed as EndpointClosed
    from wbridge.errors import InternalError as InternalError
    from wbridge.errors import LayoutError as LayoutError
    from wbridge.errors import NativeUnavailable as NativeUnavailable
    from wbridge.errors import PeerLost as PeerLost
    from wbridge.errors import PlanError as PlanError
    from wbridge.errors import ProtocolError as ProtocolError
    from wbridge.errors import UpdateAborted as UpdateAborted
    from wbridge.errors import WBridgeError as WBridgeError
    from wbridge.flow.standings import EngineStatus as EngineStatus
    from wbridge.ids import WorkerId as WorkerId
    from wbridge.layout.source_map import SourceMap as SourceMap
    from wbridge.layout.source_map import TensorSpec as TensorSpec
    from wbridge.plan.build import build_plan as build_plan
    from wbridge.plan.types import Plan as Plan
    from wbridge.session.endpoints import Source as Source
    from wbridge.session.endpoints import Target as Target
    from wbridge.session.receiver import ReceiverAdapter as ReceiverAdapter
    from wbridge.session.requests import ServedRequest as ServedRequest
    from wbridge.session.requests import VersionSpan as VersionSpan
    from wbridge.session.sender import Delivery as Delivery
    from wbridge.session.sender import SenderAdapter as SenderAdapter
    from wbridge.session.updates import RolloutHooks as RolloutHooks
    from wbridge.session.updates import Update as Update

__version__ = "0.1.0.dev0"

_HOMES = {
    "AuthenticationError": "wbridge.errors",
    "BarrierTimeout": "wbridge.errors",
    "Config": "wbridge.config",
    "ConfigError": "wbridge.errors",
    "CoverageError": "wbridge.errors",
    "Delivery": "wbridge.session.sender",
    "DeviceFailed": "wbridge.errors",
    "Difference": "wbridge.control.messages",
    "EndpointClosed": "wbridge.errors",
    "EngineCheck": "wbridge.control.messages",
    "EngineStatus": "wbridge.flow.standings",
    "InternalError": "wbridge.errors",
    "LayoutError": "wbridge.errors",
    "Mode": "wbridge.config",
    "NativeUnavailable": "wbridge.errors",
    "PeerLost": "wbridge.errors",
    "Plan": "wbridge.plan.types",
    "PlanError": "wbridge.errors",
    "ProtocolError": "wbridge.errors",
    "ReceiverAdapter": "wbridge.session.receiver",
    "RolloutHooks": "wbridge.session.updates",
    "SenderAdapter": "wbridge.session.sender",
    "ServedRequest": "wbridge.session.requests",
    "Source": "wbridge.session.endpoints",
    "SourceMap": "wbridge.layout.source_map",
    "Target": "wbridge.session.endpoints",
    "TensorSpec": "wbridge.layout.source_map",
    "Unverifiable": "wbridge.control.messages",
    "Update": "wbridge.session.updates",
    "UpdateAborted": "wbridge.errors",
    "Verification": "wbridge.control.messages",
    "VersionSpan": "wbridge.session.requests",
    "WBridgeError": "wbridge.errors",
    "WorkerId": "wbridge.ids",
    "build_plan": "wbridge.plan.build",
    "share_memory": "wbridge.device.sharing",
}
_MODULES = ("sync", "testing")

__all__ = [
    "AuthenticationError",
    "BarrierTimeout",
    "Config",
    "ConfigError",
    "CoverageError",
    "Delivery",
    "DeviceFailed",
    "Difference",
    "EndpointClosed",
    "EngineCheck",
    "EngineStatus",
    "InternalError",
    "LayoutError",
    "Mode",
    "NativeUnavailable",
    "PeerLost",
    "Plan",
    "PlanError",
    "ProtocolError",
    "ReceiverAdapter",
    "RolloutHooks",
    "SenderAdapter",
    "ServedRequest",
    "Source",
    "SourceMap",
    "Target",
    "TensorSpec",
    "Unverifiable",
    "Update",
    "UpdateAborted",
    "Verification",
    "VersionSpan",
    "WBridgeError",
    "WorkerId",
    "__version__",
    "build_plan",
    "share_memory",
    "sync",
    "testing",
]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(f"wbridge.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'wbridge' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
