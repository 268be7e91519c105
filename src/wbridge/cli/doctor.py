"""`wbridge doctor`: what works on this machine, and what to do about the rest."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import re
from collections.abc import Callable
from pathlib import Path

import msgspec

from wbridge import __version__, native
from wbridge.cli.table import print_table
from wbridge.errors import NativeUnavailable, WBridgeError
from wbridge.native import ucx
from wbridge.native.extension import num_copy_threads, why_missing
from wbridge.transport.host import host_identity
from wbridge.transport.ucx_native import USE_GPU, memory_kinds

_UCX_LIBRARY = re.compile(r"\S+/libucp\S*\.so\S*")
_SITE_UCX = (
    "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true with a site UCX >= 1.19, built with verbs, on the library path"
)


class Finding(msgspec.Struct, frozen=True):
    """One line of the report. `ok` None: absent, and only some jobs need it."""

    subject: str
    ok: bool | None
    detail: str


def run(options: argparse.Namespace) -> int:
    machine = [_packages(), _copies(), _host()]
    between_hosts = [_hosts(), _puts(), _rdma(), _ucx_on_gpus()]
    findings = [*machine, *between_hosts, _gpu(), _gpu_processes()]
    verdicts = {True: "ok", False: "missing", None: "absent"}
    print_table(("what", "verdict", "detail"), ((f.subject, verdicts[f.ok], f.detail) for f in findings))
    return 1 if any(finding.ok is False for finding in findings) else 0


def _packages() -> Finding:
    found = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "anyio", "msgspec")]
    return Finding(
        "wbridge", True, f"{__version__} on Python {platform.python_version()}, {', '.join(found)}"
    )


def _copies() -> Finding:
    """Without the extension torch copies each tensor by itself."""
    missing = why_missing()
    if missing is None:
        return Finding("copies", True, f"native, up to {num_copy_threads()} threads each")
    return Finding("copies", None, f"slow for many small or transposed tensors: {missing}")


def _host() -> Finding:
    return _try("host identity", host_identity)


def _hosts() -> Finding:
    """Workers on different hosts need ucxx."""

    def version() -> str:
        ucxx = native.require("ucxx")
        return f"ucxx {ucxx.__version__}, UCX {'.'.join(map(str, ucxx.get_ucx_version()))} in {_ucx_folder()}"

    return _try("between hosts", version)


def _puts() -> Finding:
    """Without the native worker the bytes between hosts pass through Python's loop."""
    missing = ucx.why_missing()
    if missing is None:
        return Finding("UCX puts", True, "native: bytes reach a receiver whatever its Python does")
    return Finding("UCX puts", None, f"slow, and only while the receiver's loop runs: {missing}")


def _rdma() -> Finding:
    """UCX loads its RDMA part as a plug-in from a folder beside its library; the wheels ship without it."""
    folder = _ucx_folder()
    if folder is None:
        return Finding("RDMA", None, "UCX is not loaded")
    plugins = [path.name for path in folder.glob("ucx/libuct_ib*.so*")]
    if plugins:
        return Finding("RDMA", True, f"UCX in {folder} has verbs")
    return Finding(
        "RDMA", None, f"UCX in {folder} has no verbs: hosts talk over TCP; for RDMA set {_SITE_UCX}"
    )


def _ucx_on_gpus() -> Finding:
    """UCX puts from GPU to GPU if it is told to. Without verbs it copies through the host's memory itself."""
    subject, folder = "GPU between hosts", _ucx_folder()
    if folder is None:
        return Finding(subject, None, "UCX is not loaded")
    names = {"ib": "verbs", "cuda": "CUDA copies", "cuda_gdrcopy": "gdrcopy"}
    has = {part: any(folder.glob(f"ucx/libuct_{part}.so*")) for part in names}
    lacks = ", ".join(f"no {names[part]}" for part in names if not has[part])
    detail = (
        f"UCX in {folder} has {lacks}: for those set {_SITE_UCX}" if lacks else "UCX has all parts for it"
    )
    if not has["cuda"]:
        return Finding(subject, None, f"through page-locked host memory; {detail}")
    why = _try("", _networked_gpu)
    if not why.ok:
        return Finding(subject, None, f"through page-locked host memory: {why.detail}; {detail}")
    return Finding(subject, True, f"slots on GPUs if checksum='off' or on one host; {detail}")


def _networked_gpu() -> str:
    """Open a worker of UCX as a job would."""
    from wbridge.device.select import find_network, why_no_network  # loads torch too

    if (reason := why_no_network()) is not None:
        raise NativeUnavailable(reason)
    if "cuda" not in memory_kinds(find_network(["cuda"])):
        raise NativeUnavailable(f"UCX reaches no memory of GPUs: {USE_GPU}")
    return ""


def _gpu() -> Finding:
    """Without the kernel torch copies each tensor on the GPU by itself."""

    def name() -> str:
        from wbridge.device.select import open_device  # loads torch, which the other commands do without

        device = open_device("cuda")
        device.close()
        return device.name

    finding = _try("GPU", name)
    if not finding.ok:
        return Finding("GPU", None, finding.detail)
    from wbridge.device.kernels import program  # loads torch too

    missing = program.why_missing(int(finding.detail.partition(":")[2]))
    if missing is None:
        return Finding("GPU", True, f"{finding.detail}, copies in one launch per group")
    return Finding("GPU", None, f"{finding.detail}, slow for many small tensors: {missing}")


def _gpu_processes() -> Finding:
    """Slots in its memory, and waiting for it without polling."""
    from wbridge.device.select import find_gpu_limits  # loads torch too

    subject = "GPU between processes"
    try:
        limits = find_gpu_limits()
    except WBridgeError:
        return Finding(subject, None, "no GPU")
    return Finding(subject, None if limits else True, "; ".join(limits) or "writes slots in its memory")


def _ucx_folder() -> Path | None:
    """Where the UCX that this process has loaded lies."""
    libraries = _UCX_LIBRARY.findall(Path("/proc/self/maps").read_text())
    return Path(libraries[0]).parent if libraries else None


def _try(subject: str, find: Callable[[], str]) -> Finding:
    try:
        return Finding(subject, True, find())
    except WBridgeError as exc:
        return Finding(subject, False, str(exc))
