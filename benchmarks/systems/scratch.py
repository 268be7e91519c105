"""The folder of one run: what its processes write for a while lies there, and goes with the run."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "wbridge-peers-"
SHARED_MEMORY = Path("/dev/shm")
_REMOVE = 'cat; [ -d "$1" ] || exit 0; sleep 1; exec rm -rf "$1"'
"""Reads until the run has ended. If that was sudden, its processes get a second to end, too."""


@contextmanager
def open_scratch() -> Iterator[Path]:
    """Yield an empty folder, in memory where there is such, and remove it at the end.

    A shell that waits for the end of this process does so if it is killed.
    """
    place = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
    guard = subprocess.Popen(
        ["sh", "-c", _REMOVE, "sh", str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        guard.communicate()


def directory_in_memory() -> Path:
    """Return where files lie in memory: the folder of the run, if there is a run."""
    found = Path(tempfile.gettempdir())
    return found if found.is_relative_to(SHARED_MEMORY) else SHARED_MEMORY
