"""What the tests with processes share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.process.vllm_forks import VllmForks


@pytest.fixture(scope="session")
def vllm_forks() -> Iterator[VllmForks]:
    forks = VllmForks()
    yield forks
    forks.close()
