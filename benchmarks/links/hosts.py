"""Hosts: network namespaces on this machine, joined by links of a limited rate. Linux, as root.

    with open_hosts(["trainers", "engines"], mbit=400) as hosts:
        process = context.Process(target=work)  # which calls hosts["engines"].enter() first

Namespaces have no name: they live as long as this process, or a process that entered one, holds them. So
nothing stays behind, however this process ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

NEW_NETWORK = 0x40000000
"""`CLONE_NEWNET`."""
TOOLS = ("ip", "tc")
INTERFACE = "eth0"
"""Of every host, beside loopback."""
HEADER_NBYTES = 66
"""Ethernet, IPv4, and TCP with timestamps, of each packet that the kernel counts."""
MIN_BURST_NBYTES = 32 * 1024
BURST_S = 0.005
"""A bucket smaller than what passes between two ticks of the kernel would cost part of the rate."""
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "UCX_TLS": "tcp", "VLLM_HOST_IP": "127.0.0.1"}
"""What processes on such hosts need: the name of this machine leads nowhere from there."""


def why_not() -> str:
    """Why this machine cannot do it; empty if it can."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2"
    if os.geteuid() != 0:
        return "rate-limited links need root"
    try:
        with contextlib.closing(_Namespace()) as namespace:
            namespace.run("ip", "link", "set", "lo", "up")
            namespace.run("ip", "link", "add", "wb0", "type", "veth", "peer", "name", "wb1")
            namespace.run(*_limit("wb0", 1000))
    except OSError as exc:
        return f"this machine allows no network namespaces with limited links: {exc}"
    return ""


@dataclass(frozen=True)
class Host:
    """One namespace, for whoever is to live in it. May be handed to other processes of this machine."""

    name: str
    address: str
    path: str
    """The namespace as a file, while the process that opened it lives."""

    def enter(self) -> None:
        """Move this thread, and those that it starts from now on, to the host. There is no way back."""
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        _move_into(self.path)

    def count(self) -> Counters:
        """What the kernel has counted on all interfaces of the host, to be called where it was opened."""
        found: list[str] = []

        def inside() -> None:
            _move_into(self.path)
            found.extend(Path("/proc/thread-self/net/dev").read_text().splitlines()[2:])

        _in_thread(inside)
        devices = [[int(word) for word in line.partition(":")[2].split()] for line in found]
        return Counters(*(sum(device[column] for device in devices) for column in (0, 1, 8, 9)))


class Counters(NamedTuple):
    """Bytes and packets of a host since it was opened."""

    received_nbytes: int
    received_packets: int
    sent_nbytes: int
    sent_packets: int

    def since(self, earlier: Counters) -> Counters:
        return Counters(*(now - then for now, then in zip(self, earlier, strict=True)))

    @property
    def received_payload_nbytes(self) -> int:
        return self.received_nbytes - HEADER_NBYTES * self.received_packets

    @property
    def sent_payload_nbytes(self) -> int:
        return self.sent_nbytes - HEADER_NBYTES * self.sent_packets


@contextlib.contextmanager
def open_hosts(
    names: Sequence[str], *, mbit: float, min_burst_nbytes: int = MIN_BURST_NBYTES
) -> Iterator[dict[str, Host]]:
    """Open a host for each name; what each sends, and what each receives, is limited to `mbit`.

    `min_burst_nbytes` may pass at once after a pause.

    Raises:
        OSError: this machine does not allow it; `why_not` tells beforehand.
    """
    with contextlib.ExitStack() as stack:
        switch = stack.enter_context(contextlib.closing(_Namespace()))
        switch.run("ip", "link", "add", "switch", "type", "bridge")
        switch.run("ip", "link", "set", "switch", "up")
        hosts: dict[str, Host] = {}
        for index, name in enumerate(names):
            host = stack.enter_context(contextlib.closing(_Namespace()))
            address, port = f"10.77.0.{index + 1}", f"port{index}"
            switch.run(
                "ip", "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", host.path
            )
            switch.run("ip", "link", "set", port, "master", "switch", "up")
            switch.run(*_limit(port, mbit, min_burst_nbytes))
            host.run("ip", "address", "add", f"{address}/24", "dev", INTERFACE)
            host.run("ip", "link", "set", INTERFACE, "up")
            host.run("ip", "link", "set", "lo", "up")
            host.run(*_limit(INTERFACE, mbit, min_burst_nbytes))
            hosts[name] = Host(name, address, host.path)
        yield hosts


def _limit(device: str, mbit: float, min_burst_nbytes: int = MIN_BURST_NBYTES) -> tuple[str, ...]:
    burst = max(min_burst_nbytes, int(mbit * 1e6 / 8 * BURST_S))
    rate = ("rate", f"{mbit}mbit", "burst", str(burst), "latency", "50ms")
    return ("tc", "qdisc", "add", "dev", device, "root", "tbf", *rate)


class _Namespace:
    """A namespace that only a descriptor of this process keeps."""

    def __init__(self) -> None:
        self._descriptor = _in_thread(_open_new)

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def run(self, *command: str) -> None:
        """Run a command inside.

        Raises:
            OSError: it failed.
        """

        def inside() -> None:
            _move_into(self.path)
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")

        _in_thread(inside)

    def close(self) -> None:
        os.close(self._descriptor)


def _open_new() -> int:
    _call("unshare", NEW_NETWORK)
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def _move_into(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _call("setns", descriptor, NEW_NETWORK)
    finally:
        os.close(descriptor)


def _call(name: str, *arguments: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def _in_thread(work: Callable[[], int | None]) -> int:
    """Do what changes a thread in a thread that ends with it."""
    results: list[int] = []
    failures: list[OSError] = []

    def run() -> None:
        try:
            results.append(work() or 0)
        except OSError as exc:
            failures.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return results[0]
