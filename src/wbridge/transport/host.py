"""Who shares memory with whom: the identity of this host and of this process."""

from __future__ import annotations

import os
import select
from pathlib import Path
from typing import Final

from wbridge.errors import ConfigError

_EXITING: Final = 0x4
"""PF_EXITING, among the flags of /proc/PID/stat: set before the first of its files is closed."""


def host_identity(override: str = "") -> str:
    """Return equal strings for workers that share memory: boot id, IPC and network namespace.

    `override`, from `Config.host`, replaces it.

    Raises:
        ConfigError: /proc does not say; `Config.host` does.
    """
    if override:
        return override
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{_namespace('ipc')}/{_namespace('net')}"
    except OSError as exc:
        raise ConfigError(f"cannot tell this host from others: {exc}; set `host` in the config") from exc


def process_token(pid: int = 0) -> str:
    """Return what tells this process, or `pid` of the same namespace, from all others on the host.

    The start time makes it unique although process numbers are used again.

    Raises:
        ProcessLookupError: there is no such process.
    """
    pid = pid or os.getpid()
    try:
        # The name in parentheses may contain anything; field 22 is the 20th after it.
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError as exc:
        raise ProcessLookupError(f"process {pid} has ended") from exc
    return f"{_namespace('pid')}/{pid}/{status[19]}"


def is_ending(pid: int) -> bool:
    """Whether a process of this namespace has begun to end, and the kernel still gives back what it holds.

    It drops file locks in no particular order: a GPU may still work for a process that has lost them.
    """
    try:
        process = os.pidfd_open(pid)
    except OSError:  # it has ended, or is out of sight
        return False
    try:
        if select.select([process], [], [], 0)[0]:
            return False
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return bool(int(status[6]) & _EXITING)
    except OSError:  # it has ended meanwhile
        return False
    finally:
        os.close(process)


def pid_of(token: str) -> int | None:
    """Return the process number in a `process_token`. None: it is of another namespace."""
    namespace, pid, _ = token.split("/")
    return int(pid) if namespace == _namespace("pid") else None


def _namespace(kind: str) -> str:
    return str(os.stat(f"/proc/self/ns/{kind}").st_ino)
