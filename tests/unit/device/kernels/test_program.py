"""NVRTC compiles the kernel without a GPU, and the cache never serves what is broken."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch

from wbridge.cache import Cache
from wbridge.device.kernels import digests, program
from wbridge.device.kernels.program import default_cache, load_cubin, why_missing
from wbridge.errors import NativeUnavailable


def nvrtc_missing() -> str | None:
    try:
        program.import_core()
        importlib.import_module("cuda.bindings.nvrtc").nvrtcVersion()
    except (ImportError, NativeUnavailable, RuntimeError) as exc:
        return f"{type(exc).__name__}: {exc}"
    return None


MISSING = nvrtc_missing()
needs_nvrtc = pytest.mark.skipif(MISSING is not None, reason=f"no NVRTC: {MISSING}")


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_100"])  # sm_90 is compiled below: each takes seconds
def test_the_kernel_compiles_for(arch: str, tmp_path: Path) -> None:
    cubin = load_cubin(arch, Cache(tmp_path))
    assert cubin.startswith(b"\x7fELF")
    assert program.KERNEL.encode() in cubin
    assert digests.KERNEL.encode() in cubin


@needs_nvrtc
def test_what_the_kernels_move_stays_in_registers() -> None:
    """In a thread's own memory, which the compiler takes for values that are set under a condition, each byte
    crosses the caches twice more: 0.6 of a plain copy instead of 0.9."""
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    found = nvrtc.nvrtcCreateProgram(program.read_source().encode(), b"kernels", 0, [], [])[1]
    options = [b"-std=c++17", b"-arch=sm_90", b"--ptxas-options=-v"]
    assert nvrtc.nvrtcCompileProgram(found, len(options), options)[0] == 0
    log = b" " * nvrtc.nvrtcGetProgramLogSize(found)[1]
    nvrtc.nvrtcGetProgramLog(found, log)
    pattern = (
        r"properties for (\S+)\s+\S+\s+\D*(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes"
    )
    used = {name: sum(map(int, nbytes)) for name, *nbytes in re.findall(pattern, log.decode())}
    assert {"copy_table", "digest_table"} <= set(used)
    moves = [name for name in used if "copy_items" in name or "digest" in name]
    assert len(moves) > 15
    assert {name: nbytes for name, nbytes in used.items() if nbytes > (0 if name in moves else 32)} == {}


@needs_nvrtc
def test_a_cached_kernel_is_not_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def count(source: str, arch: str) -> bytes:
        compiled.append(arch)
        return b"machine code"

    monkeypatch.setattr(program, "_compile", count)
    cache = Cache(tmp_path)
    assert load_cubin("sm_90", cache) == load_cubin("sm_90", cache) == b"machine code"
    assert compiled == ["sm_90"]
    load_cubin("sm_80", cache)
    assert compiled == ["sm_90", "sm_80"]
    assert len(list(tmp_path.iterdir())) == 2


@needs_nvrtc
def test_an_unknown_architecture_says_so(tmp_path: Path) -> None:
    with pytest.raises(NativeUnavailable, match=r"(?s)cannot compile .* for sm_1:.*install wbridge"):
        load_cubin("sm_1", Cache(tmp_path))
    assert not list(tmp_path.iterdir())


def test_the_cache_is_where_the_user_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WBRIDGE_KERNEL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert default_cache() == Path("/xdg/wbridge")
    monkeypatch.setenv("WBRIDGE_KERNEL_CACHE", "/named")
    assert default_cache() == Path("/named")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_kernel_says_why_it_is_missing() -> None:
    assert why_missing(0) == f"torch {torch.__version__} sees no GPU"


def test_without_cuda_core_the_kernel_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(NativeUnavailable, match=r"No module named 'cuda\.core'; install wbridge"):
        program.import_core.__wrapped__()
