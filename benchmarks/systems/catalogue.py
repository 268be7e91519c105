"""Which systems run which case, with what options, in which environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

CASES = ("w1", "w1-slots", "w1-tcp", "w2rep", "w2tp", "w3", "tiny", "idle")
OURS = "wbridge"
OURS_SLOTS = "wbridge-slots"
REFERENCE = "weightbridge-0.1.0"
RAW_SOCKET = "raw-socket"
ONE_COPY, TWO_THREADS = "one-copy", "two-threads"
PLAIN = (RAW_SOCKET, ONE_COPY, TWO_THREADS)
"""No products: what plain copies and sockets reach."""
COUNTED = ("w1", "w1-slots", "w3")
"""Where the calls of Python functions are counted, too."""


@dataclass(frozen=True)
class Entry:
    """One system on one case."""

    name: str
    module: str
    environment: str = ""
    """Under `.nox/peers`; empty: that of the benchmark, in which this package is installed."""
    options: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    """Of the interpreter."""
    limit_s: float = 300.0
    is_interleaved: bool = True
    """False: its set-up takes minutes, so all its updates come from one run."""
    why_not: str = ""

    def having(self, **options: str) -> Entry:
        return replace(self, options={**self.options, **options})


PACKAGE = Entry(OURS, "ours", options={"shared": "1"})
SLOTS = Entry(OURS_SLOTS, "ours")
RAY = Entry("ray", "ray_store", "ray")
NIXL = Entry("nixl", "nixl", "nixl")
GLOO = Entry("gloo", "gloo", "torch")
BROADCAST = Entry("gloo-broadcast", "gloo", "torch", options={"broadcast": "1"})
MOONCAKE = Entry("mooncake-tcp", "mooncake", "mooncake")
TORCHSTORE = Entry("torchstore", "torchstore_actors", "torchstore")
FILES = Entry("files", "files", "torch")
OLD = Entry(REFERENCE, "reference", "reference", flags=("-O",), limit_s=600.0, is_interleaved=False)
COPY_1 = Entry(ONE_COPY, "probes", "torch", options={"threads": "1"})
COPY_2 = Entry(TWO_THREADS, "probes", "torch", options={"threads": "2"})
STREAM = Entry(RAW_SOCKET, "probes", "torch", options={"socket": "1"})

RIVALS = (RAY, NIXL, GLOO, BROADCAST, MOONCAKE, TORCHSTORE, FILES, OLD)
UCX_OVER_TCP = {"UCX_TLS": "tcp"}


def entries(case: str) -> tuple[Entry, ...]:
    """All systems of a case, ours first."""
    if case == "w1-slots":
        return (replace(SLOTS, name=OURS),)
    if case == "w1-tcp":
        ours = [replace(each.having(transport="ucxx"), variables=UCX_OVER_TCP) for each in (PACKAGE, SLOTS)]
        return (*ours, NIXL.having(tls="tcp"), MOONCAKE, STREAM)
    if case == "idle":
        return PACKAGE.having(idle="1"), NIXL, GLOO, MOONCAKE, FILES
    if case == "w3":
        arena, long = MOONCAKE.having(arena="1"), "its set-up takes minutes for the 310 tensors of w1"
        rivals = (RAY, NIXL, GLOO, BROADCAST, arena, TORCHSTORE, FILES, replace(OLD, why_not=long))
        return PACKAGE, *rivals, COPY_1, COPY_2
    if case == "tiny":
        return PACKAGE, *RIVALS, COPY_1
    return PACKAGE, *RIVALS, COPY_1, COPY_2
