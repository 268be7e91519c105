"""Who shares memory with whom: the identity of this host and of this process."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path
from typing import Final

from wbridge.errors import ConfigError

_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
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


def check_descriptors(name: str, num_needed: int) -> None:
    """Return if this process can open so many files: UCX ends a process that runs out of them.

    Raises:
        ConfigError: it cannot.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    if used + num_needed > limit:
        raise ConfigError(
            f"{name}: {used} of the {limit} files that this process may open are open, and {num_needed} more"
            " are needed at least; raise the limit (`ulimit -n`)"
        )


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

    It drops file locks in no particular order: a GPU may still work for a process that has lost them. True if
    that cannot be found out now, for lack of descriptors: ask again.
    """
    try:
        # As above: the state is the first after the name, the flags the 7th, the number of threads the 18th.
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError as exc:  # otherwise it has ended, or is out of sight
        return exc.errno in _EXHAUSTED
    has_ended = status[0] in "ZX" and int(status[17]) <= 1  # a first thread that is over waits for the others
    return not has_ended and bool(int(status[6]) & _EXITING)


def pid_of(token: str) -> int | None:
    """Return the process number in a `process_token`. None: it is of another namespace."""
    namespace, pid, _ = token.split("/")
    return int(pid) if namespace == _namespace("pid") else None


def _namespace(kind: str) -> str:
    return str(os.stat(f"/proc/self/ns/{kind}").st_ino)
