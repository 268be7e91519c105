"""Where GPU tests run: on the first GPU, or, with `--on cpu`, on the host as a dry run of their own code."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


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


@pytest.fixture
def accelerator(request: pytest.FixtureRequest) -> object:
    from tests.gpu.accelerator import Accelerator

    return Accelerator(request.config.getoption("on", "cuda"))
