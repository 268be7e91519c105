"""A running AsyncLLM follows a trainer between its steps, with requests in flight."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.models.installed import needs
from tests.process.vllm_forks import VllmForks

pytestmark = [pytest.mark.backend, pytest.mark.process, pytest.mark.slow, needs("vllm")]

LIMIT_S = 180


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize(
    ("architecture", "weights", "mode", "size"),
    [
        ("qwen3", "raw", "async", 1),
        ("qwen3", "packed", "sync", 1),
        ("qwen3", "raw", "sync", 2),
        ("qwen3_moe", "raw", "sender_overlap", 1),
        ("qwen3_moe", "packed", "receiver_overlap", 1),
    ],
)
def test_c30_c43_a_running_engine_follows_with_requests_in_flight(
    architecture: str, weights: str, mode: str, size: int, tmp_path: Path, vllm_forks: VllmForks
) -> None:
    output, arguments = tmp_path / "output", (str(tmp_path), architecture, weights, mode, str(size))
    codes = vllm_forks.run("tests.process.vllm_follow:main", arguments, output=output)
    assert codes == [0], output.read_text()[-8000:]
    found = json.loads((tmp_path / "result.json").read_text())
    wanted = found["wanted"]
    assert [found["first"], found["second"], found["third"]] == wanted[1:]
    assert len({tuple(tokens) for tokens in wanted}) == 4
    assert found["long"] == [200] * 3
    for spans in found["spans"]:
        assert [version for version, _ in spans] == [1, 2]
        assert sum(count for _, count in spans) == found["prompt"] + 200 - 1
    assert found["first_spans"] == [[1, found["prompt"] + len(found["first"]) - 1]]
    assert found["third_spans"][0][0] == 3 and found["label"] == "three"
    assert [list(outcome.values()) for outcome in found["outcomes"]] == [["applied"]] * 3
