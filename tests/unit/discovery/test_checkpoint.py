"""Specs from safetensors headers, without reading weights; damage is named."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from wbridge.discovery.checkpoint import checkpoint_specs, specs_of
from wbridge.errors import LayoutError
from wbridge.layout.source_map import TensorSpec

TENSORS = {
    "a": torch.zeros(3, 4, dtype=torch.bfloat16),
    "b": torch.zeros((), dtype=torch.float32),
    "c": torch.zeros(0, 5, dtype=torch.int64),
    "d": torch.zeros(2, dtype=torch.float8_e4m3fn),
    "e": torch.zeros(2, dtype=torch.bool),
}


def test_file_directory_and_state_dict_agree(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert checkpoint_specs(tmp_path) == checkpoint_specs(tmp_path / "model.safetensors") == specs_of(TENSORS)
    assert specs_of(TENSORS)["a"] == TensorSpec((3, 4), "bfloat16")


def test_index_joins_files(tmp_path: Path) -> None:
    save_file({"a": TENSORS["a"]}, tmp_path / "one.safetensors")
    save_file({"b": TENSORS["b"]}, tmp_path / "two.safetensors")
    index = {"metadata": {}, "weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert checkpoint_specs(tmp_path) == specs_of({k: TENSORS[k] for k in ("a", "b")})
    index["weight_map"]["b"] = "one.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(LayoutError, match=r"lists 1 tensors that its files lack, first 'b'"):
        checkpoint_specs(tmp_path)


def test_absent_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"expected model\.safetensors"):
        checkpoint_specs(tmp_path)
    path = tmp_path / "model.safetensors"
    for content in (b"", b"\xff" * 20, struct.pack("<Q", 50) + b"{", struct.pack("<Q", 3) + b"[1]"):
        path.write_bytes(content)
        with pytest.raises(LayoutError, match=r"model\.safetensors"):
            checkpoint_specs(path)


def test_unknown_dtype_is_named(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(LayoutError, match=r"'w' has dtype F4"):
        checkpoint_specs(tmp_path)
