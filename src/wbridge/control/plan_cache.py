"""A cache of plans on disk, so that a job that restarts with the same workers does not plan again."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from pathlib import Path

import msgspec

_log = logging.getLogger(__name__)


class PlanCache:
    """One directory of packed plans, each under the digest of what it was made from; empty: no cache."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory) if directory else None

    def load(self, digest: str) -> bytes | None:
        """Return what was stored under `digest`; a damaged file counts as absent."""
        if self._directory is None:
            return None
        try:
            stored = self._path(self._directory, digest).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as exc:
            _log.debug("a plan in the cache is not readable", extra={"digest": digest, "error": str(exc)})
            return None
        return unsealed(stored)

    def store(self, digest: str, data: bytes) -> None:
        """Write atomically; a directory that cannot be written only costs the cache."""
        if self._directory is None:
            return
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._directory, prefix=".partial-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(sealed(data))
                os.replace(name, self._path(self._directory, digest))
            except OSError:  # a full disk is not filled further
                os.unlink(name)
                raise
        except OSError as exc:
            _log.debug(
                "the plan cache is not writable", extra={"path": str(self._directory), "error": str(exc)}
            )

    @staticmethod
    def _path(directory: Path, digest: str) -> Path:
        return directory / f"{digest}.plan"


def sealed(data: bytes) -> bytes:
    """Return the content of a file that holds `data`, with its checksum first."""
    return hashlib.sha256(data).digest() + data


def unsealed(stored: bytes) -> bytes | None:
    """Return what `sealed` took; None if the file is damaged."""
    checksum, data = stored[:32], stored[32:]
    return data if hashlib.sha256(data).digest() == checksum else None


def digest_of(*inputs: object) -> str:
    """Return a digest of all that a plan depends on."""
    return hashlib.sha256(msgspec.msgpack.encode(inputs, order="sorted")).hexdigest()
