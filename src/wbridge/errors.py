"""Every public exception: one root, one subclass for each thing a caller can do about it."""

from __future__ import annotations

from collections.abc import Iterable


class WBridgeError(Exception):
    """The root of every error that wbridge raises on purpose."""


class ConfigError(WBridgeError, ValueError):
    """A setting is wrong or two workers disagree; change the setting named in the message."""


class LayoutError(WBridgeError):
    """A parameter and the checkpoint do not fit together; fix the model or its loader."""


class CoverageError(LayoutError):
    """Some destination element has no source, or more than one."""


class PlanError(WBridgeError):
    """No plan moves what the rollouts need from what the trainers hold."""


class PeerLost(WBridgeError, ConnectionError):
    """A peer is gone; reconnect, or go on without it."""


class EndpointClosed(WBridgeError):
    """This side closed the endpoint or adapter; nothing more can be sent on it."""


class UpdateAborted(WBridgeError):
    """This attempt to publish a version ended without being applied; send it again."""


class BarrierTimeout(WBridgeError, TimeoutError):
    """A deadline passed; `missing` names those that were waited for."""

    def __init__(self, message: str, missing: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.missing: tuple[str, ...] = tuple(missing)


class ProtocolError(WBridgeError):
    """Two workers broke the contract between them, such as by sending different versions."""


class AuthenticationError(WBridgeError):
    """The shared secret of this worker is not the coordinator's."""


class NativeUnavailable(WBridgeError, ImportError):
    """An optional part is not installed; the message names the extra that brings it."""


class DeviceFailed(WBridgeError, RuntimeError):
    """A GPU, or work on it of whomever in this process, has failed; start the process again."""


class InternalError(WBridgeError):
    """A bug in wbridge; please report it."""
