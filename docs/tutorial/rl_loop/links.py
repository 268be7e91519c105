"""Slow links: trainers and engines on hosts of their own, with a limited rate between them."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[3]


@contextlib.contextmanager
def open_link(mbit: float | None) -> Iterator[Mapping[str, Any]]:
    """Yield a host for each role, or nothing if there is no limit: then all processes share this one.

    Raises:
        SystemExit: this machine cannot limit a link.
    """
    if mbit is None:
        yield {}
        return
    sys.path.append(str(REPOSITORY))  # the processes to come look there too
    from benchmarks.links.hosts import open_hosts, why_not

    if reason := why_not():
        raise SystemExit(f"--link-mbit: {reason}")
    os.environ.setdefault("WBRIDGE_SECRET", secrets.token_hex(16))  # no file with it is looked for
    with open_hosts(["trainer", "rollout"], mbit=mbit) as hosts:
        yield hosts
