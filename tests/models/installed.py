"""Which packages are there, without importing them."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def needs(package: str) -> pytest.MarkDecorator:
    """Skip where a package is not installed.

    `pytest.importorskip` would import it when tests are collected, in every session: a framework takes
    seconds, and makes each run of the garbage collector afterwards slower.
    """
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")
