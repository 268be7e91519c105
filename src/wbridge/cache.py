"""Cache: files of one directory that are there whole or not at all."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from pathlib import Path

_log = logging.getLogger(__name__)


class Cache:
    """What takes long to make, kept for the next process. Several processes may use one directory.

    What cannot be read or written only costs the cache.
    """

    def __init__(self, directory: Path | None) -> None:
        """None: nothing is kept."""
        self._directory = directory

    def load(self, name: str) -> bytes | None:
        """Return what was stored under `name`; a damaged file counts as absent."""
        if self._directory is None:
            return None
        try:
            return unsealed((self._directory / name).read_bytes())
        except FileNotFoundError:
            return None
        except OSError as exc:
            _log.debug("a file of the cache is not readable", extra={"file": name, "error": str(exc)})
            return None

    def store(self, name: str, data: bytes) -> None:
        if self._directory is None:
            return
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self._directory, prefix=".partial-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(sealed(data))
                os.replace(temporary, self._directory / name)
            except OSError:  # a full disk is not filled further
                os.unlink(temporary)
                raise
        except OSError as exc:
            _log.debug("the cache is not writable", extra={"path": str(self._directory), "error": str(exc)})


def sealed(data: bytes) -> bytes:
    """Return the content of a file that holds `data`, with its checksum first."""
    return hashlib.sha256(data).digest() + data


def unsealed(stored: bytes) -> bytes | None:
    """Return what `sealed` took; None if the file is damaged."""
    checksum, data = stored[:32], stored[32:]
    return data if hashlib.sha256(data).digest() == checksum else None
