"""Checkpoint specs from safetensors headers: names, shapes and dtypes, without reading any weight."""

from __future__ import annotations

import struct
from pathlib import Path

import msgspec

from wbridge.discovery.specs import specs_of
from wbridge.errors import LayoutError
from wbridge.layout.source_map import TensorSpec

__all__ = ["checkpoint_specs", "specs_of"]

_INDEX = "model.safetensors.index.json"
_MAX_HEADER_NBYTES = 2**28
_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu", "U16": "uint16", "I16": "int16", "F16": "float16", "BF16": "bfloat16",
    "U32": "uint32", "I32": "int32", "F32": "float32", "U64": "uint64", "I64": "int64", "F64": "float64",
    "C64": "complex64",
}  # fmt: skip


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def checkpoint_specs(path: str | Path) -> dict[str, TensorSpec]:
    """Read the specs of a checkpoint: a safetensors file, an index file, or the directory of either.

    Raises:
        LayoutError: nothing there is a safetensors checkpoint, or a file is damaged or incomplete.
    """
    path = Path(path)
    if path.is_dir():
        path = path / _INDEX if (path / _INDEX).exists() else path / "model.safetensors"
    if not path.exists():
        raise LayoutError(f"no checkpoint at {path}: expected model.safetensors or {_INDEX}")
    if path.suffix == ".json":
        return _indexed_specs(path)
    return _file_specs(path)


def _indexed_specs(index_path: Path) -> dict[str, TensorSpec]:
    try:
        weight_map = msgspec.json.decode(index_path.read_bytes(), type=_Index).weight_map
    except msgspec.DecodeError as exc:
        raise LayoutError(
            f"checkpoint index {index_path} is damaged: {exc}; save the checkpoint again"
        ) from exc
    files = {name: _file_specs(index_path.parent / name) for name in sorted(set(weight_map.values()))}
    missing = [tensor for tensor, name in weight_map.items() if tensor not in files[name]]
    if missing:
        raise LayoutError(
            f"checkpoint index {index_path} lists {len(missing)} tensors that its files lack, "
            f"first {missing[0]!r} in {weight_map[missing[0]]}; save the checkpoint again"
        )
    return {tensor: files[name][tensor] for tensor, name in weight_map.items()}


def _file_specs(path: Path) -> dict[str, TensorSpec]:
    try:
        with path.open("rb") as file:
            (nbytes,) = struct.unpack("<Q", file.read(8))
            if nbytes > _MAX_HEADER_NBYTES:
                raise LayoutError(f"{path} claims a header of {nbytes} bytes: not a safetensors file")
            raw = msgspec.json.decode(file.read(nbytes), type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(entry, type=_Entry) for name, entry in raw.items()}
    except (OSError, struct.error, msgspec.DecodeError) as exc:
        raise LayoutError(f"cannot read the safetensors header of {path}: {exc}") from exc
    unknown = [name for name, entry in entries.items() if entry.dtype not in _DTYPES]
    if unknown:
        raise LayoutError(
            f"{path}: tensor {unknown[0]!r} has dtype {entries[unknown[0]].dtype}, which is not supported"
        )
    return {name: TensorSpec(tuple(entry.shape), _DTYPES[entry.dtype]) for name, entry in entries.items()}
