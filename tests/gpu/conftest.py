"""Where GPU tests run: on the first GPU, or, with `--on cpu`, on the host as a dry run of their own code."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

HERE = Path(__file__).parent
STATUS: list[int] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--on", choices=("cuda", "cpu"), default="cuda", help="where the weights are")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    if config.getoption("on", "cuda") == "cpu":
        without = [item for item in ours if "accelerator" not in getattr(item, "fixturenames", ())]
        skip(without, "shows something of a GPU alone; --on cpu was asked for")
    elif ours and (reason := why_no_gpu()):
        skip([item for item in ours if item.get_closest_marker("gpu")], reason)


def skip(items: list[pytest.Item], reason: str) -> None:
    for item in items:
        item.add_marker(pytest.mark.skip(reason=reason))


def why_no_gpu() -> str:
    import torch

    if torch.cuda.is_available():
        return ""
    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    return f"no GPU is visible to torch {torch.__version__}, built for {built_for}"


def pytest_sessionfinish(exitstatus: int) -> None:
    STATUS.append(int(exitstatus))


def pytest_unconfigure() -> None:
    """A thread that a failed test has left waiting must not keep the process: another part of the suite waits
    for the GPU. All has been reported by now."""
    stuck = [t.name for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon]
    if STATUS and STATUS[-1] and stuck:
        sys.stderr.write(f"threads are left: {', '.join(stuck)}\n")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(STATUS[-1])


@pytest.fixture
def accelerator(request: pytest.FixtureRequest) -> object:
    from tests.gpu.accelerator import Accelerator

    return Accelerator(request.config.getoption("on", "cuda"))
