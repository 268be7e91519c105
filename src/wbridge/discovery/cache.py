"""A cache of source maps on disk, so that a restart does not trace again."""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import torch

from wbridge.discovery.specs import parameter_spec
from wbridge.discovery.traced import storage_key
from wbridge.layout.source_map import SourceMap, TensorSpec

_FORMAT = 1
_LOG = logging.getLogger(__name__)


class _Entry(msgspec.Struct, frozen=True):
    format: int
    digest: str
    source_map: SourceMap


class Cache:
    """One directory of source maps, each under the digest of what it depends on."""

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)

    def load(self, digest: str) -> SourceMap | None:
        """Return the map of that digest; a damaged or foreign file counts as absent."""
        path = self._path(digest)
        try:
            entry = msgspec.msgpack.decode(path.read_bytes(), type=_Entry)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as exc:
            _LOG.debug("source map cache entry is not readable", extra={"path": str(path), "error": str(exc)})
            return None
        if entry.format != _FORMAT or entry.digest != digest:
            _LOG.debug("source map cache entry is foreign", extra={"path": str(path)})
            return None
        return entry.source_map

    def store(self, digest: str, source_map: SourceMap) -> None:
        """Write atomically; a directory that cannot be written only costs the cache."""
        data = msgspec.msgpack.encode(_Entry(_FORMAT, digest, source_map))
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._directory, prefix=".partial-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                os.replace(name, self._path(digest))
            except OSError:  # a full disk is not filled further
                os.unlink(name)
                raise
        except OSError as exc:
            _LOG.debug(
                "source map cache is not writable", extra={"path": str(self._directory), "error": str(exc)}
            )

    def _path(self, digest: str) -> Path:
        return self._directory / f"{digest}.sourcemap"


def digest_of(
    *,
    checkpoint: Mapping[str, TensorSpec],
    tensors: Mapping[str, torch.Tensor],
    load_weights: Callable[..., object],
    key: Mapping[str, object],
) -> str:
    """Return a digest of all that a source map depends on.

    The loader counts by its source file and the version of its distribution; what else steers it,
    such as its place in a mesh or the model's config, must be in `key`.
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in (
        {"format": _FORMAT, "torch": str(torch.__version__), "wbridge": _version_of("wbridge")},
        _loader_identity(load_weights),
        {name: repr(value) for name, value in key.items()},
        dict(checkpoint),
        {name: parameter_spec(tensor) for name, tensor in tensors.items()},
        _sharing(tensors),
    ):
        digest.update(msgspec.msgpack.encode(part))
    return digest.hexdigest()


def _sharing(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Name for each tensor the first one in the same storage: tied weights give another map."""
    first: dict[int, str] = {}
    return [first.setdefault(storage_key(tensor), name) for name, tensor in tensors.items()]


def _loader_identity(load_weights: Callable[..., object]) -> dict[str, str]:
    function = inspect.unwrap(getattr(load_weights, "func", load_weights))
    owner = getattr(function, "__self__", None)
    subject = type(owner) if owner is not None else function
    if not (inspect.isfunction(subject) or inspect.isclass(subject)):
        subject = type(subject)
    module = str(getattr(subject, "__module__", ""))
    try:
        source = inspect.getsource(subject)
    except (OSError, TypeError):
        source = ""
    return {
        "name": f"{module}.{getattr(subject, '__qualname__', '')}",
        "source": hashlib.blake2b(source.encode(), digest_size=16).hexdigest(),
        "version": _version_of(module.partition(".")[0]),
    }


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return ""
