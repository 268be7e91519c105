"""What every test shares: one event loop, reproducible examples, one compute thread, no thread left."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")  # inherited by the processes that tests start

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "project",
    derandomize=True,
    deadline=None,
    max_examples=60,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],  # the machine may be shared; time is not what is tested
)
settings.load_profile("project")


def pytest_collection_finish() -> None:
    """What is imported by now stays: the collector need not look through it each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def one_compute_thread() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_thread_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test ends every thread of ours that it started."""
    before = set(threading.enumerate())
    yield
    if request.node.get_closest_marker("backend"):
        return  # frameworks keep threads for the life of the process
    left = [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("wbridge")]
    for thread in left:
        thread.join(5.0)
    assert not [thread.name for thread in left if thread.is_alive()], "threads outlived the test"
