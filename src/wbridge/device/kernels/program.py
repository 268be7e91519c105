"""The compiled kernels: NVRTC makes them for each architecture at first use, and a directory keeps them."""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch

from wbridge.cache import Cache
from wbridge.errors import NativeUnavailable

CACHE_VARIABLE: Final = "WBRIDGE_KERNEL_CACHE"
KERNEL: Final = "copy_table"
_SOURCES: Final = ("strided.cu", "digest.cu")
"""One program: each uses what is in those before it."""
_REMEDY: Final = "install wbridge[cu12] or wbridge[cu13], whichever torch was built for"


@functools.cache
def why_missing(device_index: int) -> str | None:
    """Say why the kernel is not used on this GPU and what to do about it; None if it is used."""
    try:
        load_kernel(device_index)
    except NativeUnavailable as exc:
        return str(exc)
    return None


@functools.cache
def load_kernel(device_index: int, name: str = KERNEL) -> Any:  # each version of cuda.core has its own Kernel
    """Return a kernel for this GPU, from the cache or compiled now, which takes about a second.

    Raises:
        NativeUnavailable: cuda.core or NVRTC is missing, or they do not know this GPU.
    """
    if not torch.cuda.is_available():
        raise NativeUnavailable(f"torch {torch.__version__} sees no GPU")
    core = import_core()
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability(device_index))
    cubin = load_cubin(arch, Cache(default_cache()))
    try:
        with torch.cuda.device(device_index):
            core.Device(device_index).set_current()
            return core.ObjectCode.from_cubin(cubin).get_kernel(name)
    except Exception as exc:  # each version of cuda.core has its own error types
        raise NativeUnavailable(f"the kernels for {arch} do not load: {exc}; {_REMEDY}") from exc


def launch(device_index: int, stream: torch.cuda.Stream, kernel: Any, config: Any, *arguments: int) -> None:
    """Start a kernel in a stream of this GPU, whichever is current in this thread. `Any`: as above."""
    core = import_core()
    with torch.cuda.device(device_index):
        core.Device(device_index).set_current()  # torch alone leaves a new thread without a context
        core.launch(core.Stream.from_handle(stream.cuda_stream), config, kernel, *arguments)


@functools.cache
def import_core() -> ModuleType:
    """Return the public module of cuda.core, which was another before version 1.

    Raises:
        NativeUnavailable: it is not installed.
    """
    try:
        core = importlib.import_module("cuda.core")
        if hasattr(core, "Program"):
            return core
        return importlib.import_module("cuda.core.experimental")
    except ImportError as exc:
        raise NativeUnavailable(f"cuda.core does not load: {exc}; {_REMEDY}") from exc


def load_cubin(arch: str, cache: Cache) -> bytes:
    """Return the machine code for an architecture such as `sm_90`, from `cache` if it is there and whole.

    Needs no GPU. What cannot be kept in `cache` is returned all the same.

    Raises:
        NativeUnavailable: cuda.core or NVRTC is missing, or does not know the architecture.
    """
    source = read_source()
    key = "\0".join((source, arch, _nvrtc_version()))
    name = f"kernels-{arch}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.cubin"
    cubin = cache.load(name)
    if cubin is None:
        cubin = _compile(source, arch)
        cache.store(name, cubin)
    return cubin


def read_source() -> str:
    """Return the program that has all kernels."""
    return "\n".join(files(__package__).joinpath(name).read_text(encoding="utf-8") for name in _SOURCES)


def default_cache() -> Path:
    """Return the directory that `WBRIDGE_KERNEL_CACHE` names, else one in the user's cache directory."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wbridge"


def _nvrtc_version() -> str:
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        return str(nvrtc.nvrtcVersion()[1:])
    except (ImportError, RuntimeError) as exc:  # the bindings, the library
        raise NativeUnavailable(f"NVRTC does not load: {exc}; {_REMEDY}") from exc


def _compile(source: str, arch: str) -> bytes:
    core = import_core()
    try:
        program = core.Program(source, "c++", core.ProgramOptions(std="c++17", arch=arch))
        return bytes(program.compile("cubin").code)
    except Exception as exc:  # each version of cuda.core has its own error types
        raise NativeUnavailable(f"NVRTC cannot compile the kernels for {arch}: {exc}; {_REMEDY}") from exc
